"""Write the cards of the models that docs/results reports on, from the results of their runs.

python scripts/model_cards.py          # name the cards that differ from their results
python scripts/model_cards.py --write  # write all of them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoConfig

from cacheformers.hub.results import passkey
from cacheformers.training.results import adapter_card, scratch_card
from cacheformers.training.scratch import decoder_of, model_config, read_config
from cacheformers.training.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CARDS = ROOT / "docs" / "results", ROOT / "model_cards"
IN_A_RUN = "Every option and every loss is in `train_result.json`"


def cards() -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of each card."""
    for file in sorted(RESULTS.glob("*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        for name, result in results.items():
            if isinstance(result, dict) and "rates" in result and result["options"]["train"]["steps"] > 1:
                found = with_passkeys(run_card(result), Path(result["options"]["train"]["output"]), results)
                here = (
                    f"What was found: [{file.stem}](../docs/results/{file.stem}.md). Scores and options: `{name}` in "
                    f"[{file.name}](../docs/results/{file.name})"
                )
                card = "_".join([file.stem, *(word for word in name.split("_") if word != "training")])
                yield CARDS / f"{card}.md", found.replace(IN_A_RUN, here)


def run_card(result: dict[str, Any]) -> str:
    """Return the card that `train_adapt.py` writes for a run; paths mean the same on every machine."""
    options = result["options"]
    options["data"]["train"] = [Path(source).name for source in options["data"]["train"]]
    result = {**result, "losses": [0.0] * options["train"]["steps"]}  # the card only counts them
    if options["model"]["init"] == "pretrained":
        options["model"]["base"] = f"./{options['model']['base']}"  # a folder, also where it does not exist
        return adapter_card(result)
    path, tokenizer = ROOT / options["scratch"]["model_config"], options["scratch"]["tokenizer"]
    config = AutoConfig.from_pretrained(path)
    if tokenizer == "bytes":
        config = model_config(path, open_tokenizer(tokenizer, decoder_of(read_config(path)).get("vocab_size")))
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return scratch_card(result, Path(folder))


def with_passkeys(card: str, output: Path, results: dict[str, Any]) -> str:
    """Put into a card's metadata how many passkeys the model in `output` found."""
    asked = [result for result in results.values() if "lengths" in result and result["options"]["adapter"]]
    found = [entry for result in asked if Path(result["options"]["adapter"]) == output for entry in passkey(result)]
    if not found:
        return card
    parsed = ModelCard(card)
    data: Any = parsed.data
    data.model_name, data.eval_results = output.name, found
    return str(parsed)


def main() -> None:
    found = dict(cards())
    if sys.argv[1:] == ["--write"]:
        for path, text in found.items():
            path.write_text(text, encoding="utf-8")
    differing = [path.name for path, text in found.items() if not path.exists() or path.read_text() != text]
    if differing:
        sys.exit(f"These differ from docs/results (--write writes them anew): {', '.join(differing)}")


if __name__ == "__main__":
    main()
