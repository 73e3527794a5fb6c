"""Times side by side in one process, peak memory, and what a result file says about where it came from."""

from __future__ import annotations

import ctypes
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from cacheformers.training.environment import environment

RESULTS = Path("docs/results")


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of each run, by name: all once to warm up, then round after round in turn, so that they share what else
    the machine does."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            settle(device)
            start = time.perf_counter()
            run()
            settle(device)
            times[name].append(time.perf_counter() - start)
    return times


def settle(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def ratio(times: dict[str, list[float]], name: str, over: str) -> dict[str, float]:
    """One run's time over another's of the same round: median, and the middle half of the rounds."""
    ratios = [own / other for own, other in zip(times[name], times[over], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"ratio": median, "low": low, "high": high, "seconds": statistics.median(times[name])}


def shown(found: dict[str, float], digits: int = 2) -> str:
    """A ratio and its spread, as tables show it."""
    ratio, low, high = (f"{found[name]:.{digits}f}" for name in ("ratio", "low", "high"))
    return f"{ratio} ({low} - {high})"


def peak_extra(run: Callable[[], Any], device: str = "cpu") -> int:
    """Bytes that a run holds at most beyond what was held before.

    On a CPU (Linux) this is what the process holds. What its allocator kept from before is given back first, or it
    would hide what the run takes.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest value so far is forgotten
    before = held("VmRSS")
    run()
    return held("VmHWM") - before


def held(name: str) -> int:
    """Bytes that the system's account of this process names: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def processor() -> str:
    """Name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def about(device: str = "cpu") -> dict[str, Any]:
    """What a result needs to be repeated: command, commit, versions, machine."""
    facts = environment(torch.device(device))
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    found = {"command": " ".join(["python", script, *sys.argv[1:]]), "processor": processor(), **facts}
    return found | ({"faiss": importlib.import_module("faiss").__version__} if find_spec("faiss") else {})


def write_json(folder: Path, name: str, result: dict[str, Any]) -> Path:
    """Write a result as `folder/name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def draw_lines(
    path: Path, title: str, across: str, up: str, lines: dict[str, list[tuple[float, float]]], log: bool = True
) -> None:
    """Draw lines of (x, y) into a PNG, by name.

    Args:
        across, up: labels of the axes.
        log: both axes are logarithmic.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for (name, points), marker in zip(lines.items(), "osD^vPX" * len(lines), strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
    axes.set(title=title, xlabel=across, ylabel=up)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_bars(path: Path, title: str, along: str, bars: dict[str, dict[str, float]], asked: dict[str, float]) -> None:
    """Draw ratios with the middle half of their rounds into a PNG, by name, and as a line what was asked for.

    Args:
        bars: what `ratio` returns, by name.
        asked: the most that a ratio should be, by name; names may be missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.5 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, found) in enumerate(bars.items()):
        spread = [[found["ratio"] - found["low"]], [found["high"] - found["ratio"]]]
        axes.barh(place, found["ratio"], xerr=spread, color="tab:blue", height=0.6, capsize=3)
        if name in asked:
            axes.plot([asked[name]] * 2, [place - 0.4, place + 0.4], color="tab:red")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(title=title, xlabel=f"{along} (red: what was asked for)" if asked else along)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
