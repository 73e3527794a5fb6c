"""Draw README's picture: perplexity of six held-out books by position, from docs/results/smollm2_books.json.

python scripts/readme_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

from cacheformers.common.plots import COLORS, MARKERS, new_figure

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
LINES = {
    "base": "base",
    "LoRA": "lora",
    "Neurocache, another book in memory": "other document",
    "Neurocache": "cache 16,384",
}


def main() -> None:
    """Write smollm2_books/position.png."""
    runs = json.loads((RESULTS / "smollm2_books.json").read_text(encoding="utf-8"))
    rows = {row: score for found in reversed(runs.values()) for row, score in found["scores"].items()}
    figure, [axes] = new_figure(
        "SmolLM2-135M in segments of 1,024 tokens, six held-out books", ["perplexity per token"]
    )
    for number, (label, row) in enumerate(LINES.items()):
        found = rows[row]["by_position"]
        style = {"color": COLORS[number], "marker": MARKERS[number]}
        axes.plot([place["perplexity"] for place in found.values()], label=label, **style)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_xlabel("tokens of the book read before")
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "smollm2_books" / "position.png", dpi=100)


if __name__ == "__main__":
    main()
