"""When, where and with what a result came about."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cacheformers.common.gguf_base import base_origin


def environment(device: torch.device, processes: int = 1, base: str | None = None) -> dict[str, Any]:
    """Date, commit, versions, machine, and where the weights of a base come from if its folder says so."""
    libraries = ("cacheformers", "torch", "transformers", "peft", "accelerate", "datasets")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": processes,
        "base_origin": base_origin(base) if base else None,
    }


def origin_lines(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return a line for each base of some results whose origin is known."""
    found = (result.get("environment", {}).get("base_origin") for result in results)
    return [f"Base: {origin}." for origin in dict.fromkeys(found) if origin]


def git_commit(folder: Path) -> str | None:
    """Return the commit of a working tree, marked if files differ from it; None for an installed package."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
