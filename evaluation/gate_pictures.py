"""Pictures of gates: a heat map of layers by heads, bars by layer, and a text whose tokens have their gates' color."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cacheformers.evaluation.plots import COLOURS, GREY, beside, can_draw, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ max-width: 50em; margin: 2em auto; font: 16px/1.6 serif; }}
main {{ white-space: pre-wrap; }}
.near {{ color: #999999; }}
</style>
<h1>{title}</h1>
<p>Color: <span style="background: {none}">0, the window is enough</span> to
<span style="background: {full}">1, looks at everything before</span>; the mean of layers and heads, which each token
shows when pointed at. <span class="near">Gray</span> tokens have nothing beyond the window.</p>
<main>{tokens}</main>
</html>
"""


def save_figure(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw into a file; says how to install matplotlib where it is missing."""
    if not can_draw(path.name):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(path)


def share_map(layers: Sequence[int], shares: Tensor) -> Figure:
    """The memory's share in every head: `[layers, heads]`, the top layer above."""
    count, heads = shares.shape
    figure, (axes,) = new_figure("Share of the memory, sigmoid(beta)", ["layer"])
    figure.set_size_inches(max(5, 0.4 * heads + 3), max(3, 0.35 * count + 1.5))
    axes.grid(False)
    image = axes.imshow(shares.cpu().numpy(), cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    axes.set_yticks(range(count), [str(layer) for layer in layers])
    axes.set_xticks(range(heads))
    axes.set_xlabel("head")
    figure.colorbar(image, ax=axes, label="0: local attention, 1: memory")
    return figure


def share_history(log: Sequence[Mapping[str, Any]]) -> Figure:
    """How heads' shares moved in training: mean and range by step, and how many heads were in each tenth.

    Args:
        log: entries with `step`, `share_mean`, `share_min`, `share_max` and `share_histogram`.
    """
    figure, (above, below) = new_figure("Share of the memory in training", ["sigmoid(beta)", "heads"], sharex=False)
    steps = [entry["step"] for entry in log]
    lowest, highest = ([entry[f"share_{name}"] for entry in log] for name in ("min", "max"))
    above.fill_between(steps, lowest, highest, color=COLOURS[5], alpha=0.5, label="all heads")
    above.plot(steps, [entry["share_mean"] for entry in log], color=COLOURS[0], label="mean")
    above.set(xlabel="step", ylim=(0, 1))
    above.legend(frameon=False)
    histograms_beside(below, {f"step {entry['step']}": entry["share_histogram"] for entry in (log[0], log[-1])})
    return figure


def histograms_beside(axes: Axes, counts: Mapping[str, Sequence[int]]) -> None:
    """Bars for the tenths from 0 to 1, those of several histograms beside each other."""
    width = 0.8 / len(counts)  # of a bar, in tenths
    for number, (name, bars) in enumerate(counts.items()):
        places = [(tenth + 0.5 + beside(number, len(counts), 0.8 - width)) / len(bars) for tenth in range(len(bars))]
        axes.bar(places, bars, width=width / len(bars), color=COLOURS[number % 8], label=name)
    axes.set(xlabel="0: window or local attention, 1: everything or memory", xlim=(0, 1))
    axes.legend(frameon=False)


def by_layer(means: Mapping[int, Tensor], gate_per: str, histogram: Sequence[int]) -> Figure:
    """The mean gate of each layer as a bar, of each of its heads as a dot; and how many gates are in each tenth.

    Args:
        means: by layer, `[channels]`.
        histogram: gates of all layers in each tenth from 0 to 1.
    """
    figure, (axes, below) = new_figure("Gates", ["mean by layer", "gates of tokens"], sharex=False)
    for place, mean in enumerate(means.values()):
        axes.bar(place, float(mean.mean()), color=COLOURS[5])
        if len(mean) > 1:
            places = [place + beside(number, len(mean), 0.6) for number in range(len(mean))]
            axes.plot(places, mean.tolist(), linestyle="", marker="o", markersize=4, color=COLOURS[0])
    axes.axhline(0.5, color=GREY, linewidth=0.8)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(len(means)), [str(layer) for layer in means])
    axes.set_xlabel("layer" if gate_per == "layer" else f"layer (dots: one a {gate_per.replace('_', ' ')})")
    histograms_beside(below, {"all layers": histogram})
    return figure


def page(title: str, pieces: Sequence[str], gates: Sequence[float], counted: Sequence[bool]) -> str:
    """A text as HTML, each token on the color of its gate.

    Args:
        pieces, gates, counted: of each token: what it stands for, its gate, whether it has something far.
    """
    tokens = [
        f'<span style="background: {color(gate)}" title="{gate:.3f}">{html.escape(piece)}</span>'
        if far
        else f'<span class="near">{html.escape(piece)}</span>'
        for piece, gate, far in zip(pieces, gates, counted, strict=True)
    ]
    return PAGE.format(title=html.escape(title), none=color(0.0), full=color(1.0), tokens="".join(tokens))


def color(gate: float) -> str:
    """White for 0, orange for 1."""
    return f"rgba(230, 159, 0, {gate:.3f})"
