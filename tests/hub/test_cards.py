"""The model card that `train_adapt.py` writes, and what stays of the one before it."""

import json

from huggingface_hub.repocard import metadata_load
from recipe import arguments

from cacheformers import train_adapt
from cacheformers.hub.results import main as write_results

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
