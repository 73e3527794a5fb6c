"""Times side by side in one process, peak memory, and results as JSON, Markdown and plots."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cacheformers.common.environment import environment

RESULTS = Path("docs/results")
Points = list[tuple[float, float]]


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each run, by name; with the clock `time.process_time` the processor's, which others share.

    All run once to warm up, then in turn, round after round, so that other load on the machine affects all alike.
    """
    for run in runs.values():
        seconds_of(run, device, clock)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds_of(run, device, clock))
    return times


def seconds_of(run: Callable[[], object], device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    start = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def ratio(times: dict[str, list[float]], name: str, over: str) -> dict[str, float]:
    """Return one run's time over another's of the same round: the median and the middle half of the rounds."""
    ratios = [own / other for own, other in zip(times[name], times[over], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ratio": median, "low": low, "high": high, "seconds": statistics.median(times[name])}


def shown(found: Mapping[str, Any], digits: int = 2) -> str:
    """Format a ratio and its spread for a table."""
    ratio, low, high = (f"{found[name]:.{digits}f}" for name in ("ratio", "low", "high"))
    return f"{ratio} ({low} - {high})"


def peak_extra(run: Callable[[], Any], device: str = "cpu") -> int:
    """Return how many bytes more than before are in use at the peak of a run.

    On a CPU (Linux) this is the process's resident memory. Memory that the allocator kept from earlier runs is given
    back first, or it would hide what the run takes.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = trimmed()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run()
    return held("VmHWM") - before


def trimmed() -> int:
    """Return the process's resident bytes after the allocator has given free memory back to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    return held("VmRSS")


def held(name: str) -> int:
    """Return bytes from the system's account of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def processor() -> str:
    """Return the name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def about(device: str = "cpu") -> dict[str, Any]:
    """Return command, commit, versions and machine of this run."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    found = {"command": " ".join(["python", script, *sys.argv[1:]]), "processor": processor()}
    found |= environment(torch.device(device))
    return found | ({"faiss": importlib.import_module("faiss").__version__} if find_spec("faiss") else {})


def parser(doc: str | None, folder: str = "costs") -> argparse.ArgumentParser:
    """Return a parser with the option that all benchmarks share: `--output`, a folder in docs/results by default."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=RESULTS / folder, help="folder of results (default: %(default)s)")
    return made


def save(
    name: str,
    options: argparse.Namespace,
    result: dict[str, Any],
    page: Callable[[dict[str, Any]], str] | None = None,
    indent: int | None = 1,
) -> Path:
    """Write a result, with its circumstances and options, as NAME.json and, if it has a page, NAME.md.

    Args:
        indent: of the JSON; None for one line, where a result has many numbers.

    Returns:
        Where its plot goes, NAME.png.
    """
    given = {key: str(value) for key, value in vars(options).items() if key != "output"}
    result = {"about": about(getattr(options, "device", "cpu")), "settings": given, **result}
    path: Path = options.output / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")
    print(f"Wrote {path}")
    if page is not None:
        text = page(result)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        print(text)
    return path.with_suffix(".png")


def opening(title: str, result: dict[str, Any], text: str) -> list[str]:
    """Return the first lines of a page: title, command, circumstances and, in the same paragraph, what was measured."""
    facts = result["about"]
    where = f"Commit {facts['commit']}, {facts['date'][:10]}; {facts['processor']}, {facts['machine']}"
    return [f"# {title}", "", f"`{facts['command']}`", "", f"{where}; torch {facts['torch']}. {text}", ""]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; numbers, in all columns but the first, are flush right."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


@dataclass(frozen=True)
class Panel:
    """One panel of a plot: lines by name, and the labels of the axes."""

    title: str
    across: str
    up: str
    lines: dict[str, Points]


def draw_lines(path: Path, panels: Sequence[Sequence[Panel]], log: bool = True) -> None:
    """Draw rows of panels into a PNG, on logarithmic axes or from 0 upwards."""
    from matplotlib.figure import Figure

    size = (2 + 5 * len(panels[0]), 1.5 + 3 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(panels), len(panels[0]), squeeze=False)
    for axes, panel in zip(grid.flat, (panel for row in panels for panel in row), strict=True):
        for (name, points), marker in zip(panel.lines.items(), "osD^vPX" * len(panel.lines), strict=False):
            axes.plot(*zip(*points, strict=True), marker=marker, label=name)
        axes.set(title=panel.title, xlabel=panel.across, ylabel=panel.up)
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    write(figure, path)


def draw_bars(path: Path, panels: dict[str, dict[str, dict[str, float]]], asked: dict[str, float]) -> None:
    """Draw panels of bars by name into a PNG, with the highest value that was asked for in red.

    Args:
        panels: by title, what `ratio` returns; without `low` and `high` a bar has no spread.
        asked: by name; names may be missing.
    """
    from matplotlib.figure import Figure

    names = list(next(iter(panels.values())))
    figure = Figure(figsize=(2 + 5 * len(panels), 1.2 + 0.5 * len(names)), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, (title, bars) in zip(grid.flat, panels.items(), strict=True):
        for place, (name, found) in enumerate(bars.items()):
            value = found["ratio"]
            spread = [[value - found.get("low", value)], [found.get("high", value) - value]]
            bar = axes.barh(place, value, xerr=spread if "low" in found else None, color="tab:blue", height=0.6)
            axes.bar_label(bar, fmt="%.3g", padding=3)
            if name in asked:
                axes.plot([asked[name]] * 2, [place - 0.4, place + 0.4], color="tab:red")
        axes.set(title=title, yticks=range(len(names)))
        axes.set_yticklabels(names)
        axes.margins(x=0.18)
    grid[0, 0].invert_yaxis()
    write(figure, path)


def write(figure: Any, path: Path) -> None:
    """Write a figure as a PNG of 64 colors, which takes a quarter of the bytes."""
    from PIL import Image

    figure.savefig(path, dpi=100)
    Image.open(path).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
