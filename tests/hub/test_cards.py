"""The model card that `train_adapt.py` writes, what stays of the one before it, and the cards in model_cards/."""

import json
import runpy
from pathlib import Path

from huggingface_hub.repocard import metadata_load
from recipe import arguments

from cacheformers import train_adapt
from cacheformers.hub.results import main as write_results

ROOT = Path(__file__).resolve().parents[2]
PASSKEY = {  # a passkey result's form
    "name": "adapter",
    "score": 75.0,
    "lengths": [1024, 4096],
    "depths": [0.0, 100.0],
    "scores": [[100.0, 100.0], [100.0, 0.0]],
    "cases": [],
}
OWN = "---\nlicense: mit\n---\n# My own card\n"


def trained(folder, *more):
    train_adapt.main(arguments(folder, "--steps=2", "--plots=false", "--device=cpu", *more))
    return folder / "adapter"


def test_evaluating_again_keeps_results_that_were_written_into_the_card(folder):
    adapter, passkey, valid = trained(folder), folder / "passkey.json", f"--valid={folder / 'valid.jsonl'}"
    assert "model-index" not in metadata_load(adapter / "README.md")
    passkey.write_text(json.dumps(PASSKEY))
    write_results([str(passkey), "--card", str(adapter)])
    before = metadata_load(adapter / "README.md")["model-index"]
    assert before[0]["results"] and "Nothing: the run had no held-out" in (adapter / "README.md").read_text()
    trained(folder, valid, "--resume")
    assert metadata_load(adapter / "README.md")["model-index"] == before
    assert "held-out documents, " in (adapter / "README.md").read_text()  # the rest is new


def test_a_persons_card_stays(folder):
    adapter = trained(folder)
    (adapter / "README.md").write_text(OWN)
    trained(folder, f"--valid={folder / 'valid.jsonl'}", "--resume")
    assert (adapter / "README.md").read_text() == OWN


def test_committed_cards_are_those_of_the_committed_results():
    """Each is what `python scripts/model_cards.py --write` makes, and says where the weights of its base come from."""
    folder = ROOT / "model_cards"
    cards = dict(runpy.run_path(str(ROOT / "scripts" / "model_cards.py"))["cards"]())
    committed = {path: path.read_text() for path in folder.glob("*.md") if path.stem not in ("README", "template")}
    assert committed == cards
    on_smollm2 = {path for path, text in cards.items() if " on smollm2-135m-instruct\n" in text}
    assert on_smollm2 == {path for path, text in cards.items() if "Base: the Q4_1 weights of SmolLM2" in text}
    listed = (folder / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in cards)
