"""What `cacheformers ask --explain` shows: for each token of an answer, the passages that were retrieved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cacheformers.modeling.tracing import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASSAGE, SHOWN = 16, 2  # tokens of a passage, and how many are shown for a token
BINS = 120  # stretches of the document in the picture
FORGOTTEN = "0.8"  # gray


def print_tokens(trace: Trace, tokens: list[str]) -> None:
    """A line for each token of the answer and each of the passages it retrieved most often."""
    print(f"\nEach token of the answer, and where its {len(trace.chosen[0])} searches hit:")
    for token, retrieved in zip(tokens, trace.chosen, strict=True):
        name = quoted(token)
        for passage in trace.passages([retrieved], PASSAGE, SHOWN):
            print(f"  {name:<16} {passage.times:>2} near token {passage.first:>9,}: {passage.text}")
            name = ""
        if name:
            print(f"  {name:<16}  nothing")


def quoted(token: str) -> str:
    """A token with its spaces and line ends to be seen."""
    return json.dumps(token, ensure_ascii=False)


def counts(retrieved: list[Tensor], length: int) -> Tensor:
    """How often each stretch of a document of `length` tokens was retrieved for each token, `[tokens, BINS]`."""
    bins = min(BINS, length)
    places = [(numbers * bins // length).clamp(max=bins - 1) for numbers in retrieved]
    return torch.stack([torch.bincount(place, minlength=bins) for place in places])


def gone_bins(table: Tensor, length: int, forgotten: int) -> Tensor:
    """Which cells of `counts` show nothing but forgotten tokens, `[tokens, BINS]`.

    What was retrieved just before it was forgotten stays visible.
    """
    bins = table.shape[1]
    ends = torch.arange(1, bins + 1) * length // bins
    return (ends <= forgotten) & (table == 0)


def heat_map(trace: Trace, tokens: list[str], path: Path, title: str) -> None:
    """Draw which parts of the document each token of the answer retrieved; what the memory has forgotten is gray.

    Raises:
        ModuleNotFoundError: matplotlib is missing; says how to install it.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('The heat map needs matplotlib: pip install "cacheformers[eval]"') from error
    from numpy.ma import masked_where

    length = trace.memory.tokens_read[0]
    forgotten = length - trace.memory.tokens_kept[0]
    table = counts(trace.chosen, length)
    gone = gone_bins(table, length, forgotten)
    figure: Figure = Figure(figsize=(9, 1.5 + 0.16 * len(tokens)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(
        masked_where(gone.numpy(), table.numpy()),
        aspect="auto",
        cmap=colormaps["magma_r"].with_extremes(bad=FORGOTTEN),
        extent=(0, length, len(tokens), 0),
    )
    axes.set_yticks([number + 0.5 for number in range(len(tokens))], [quoted(token) for token in tokens], fontsize=7)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_xlabel("token of the document" + (f" (gray: the first {forgotten:,}, forgotten)" if forgotten else ""))
    axes.set_title(title, parse_math=False, fontsize=9)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.colorbar(image, label="times retrieved")
    figure.savefig(path)
