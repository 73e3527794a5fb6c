"""How large memory files are, how fast they load, and how much faster `ask` is than reading a book again.

    python benchmarks/memory_files.py                                  # all of Hamlet: a quarter of an hour on one core
    python benchmarks/memory_files.py --characters 22000 --output /tmp/memory_files

Two parts. First, memories of 131,072 entries, of random numbers (what they are makes no difference to a file), with a
text of five characters a token. Then the commands themselves on SmolLM2-135M with a new adapter: `cacheformers read`,
and `cacheformers ask` in a process of its own, for a memory file asked often and for one that is read anew each time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, opening, parser, save, seconds_of, table
from models import BASE_CONFIGS
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.modeling.architectures import base_shape
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.origin import Source

ENTRIES, REPEATS = 131_072, 5
SHAPES = {"smollm2-135m": "float32", "llama-2-7b": "bfloat16"}


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__, "")
    given.add_argument("--base", default="data/smollm2-135m-instruct")
    given.add_argument("--book", default="data/plays/valid/hamlet.md")
    given.add_argument("--characters", type=int, help="read only the first N characters of the book")
    given.add_argument("--question", default="Who killed Hamlet's father?")
    options = given.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        result = {"files": [files_of(shape, Path(scratch)) for shape in SHAPES], **asking(Path(scratch), options)}
    save("memory_files", options, result, page)


def files_of(shape: str, folder: Path) -> dict[str, Any]:
    """Measure the file of a memory as after a document of `ENTRIES` tokens: size, and seconds to save and load."""
    adapter = cacheformers.NeurocacheAdapterConfig(cache_size=ENTRIES, cache_dtype=SHAPES[shape])
    resolved = adapter.resolve(base_shape(AutoConfig.from_pretrained(BASE_CONFIGS / shape)))
    devices = dict.fromkeys(resolved.layers, torch.device("cpu"))
    state = resolved.new_state(1, devices, torch.float32, keep_values=False)
    for ring in state.rings.values():
        ring.append(0, torch.randn(ENTRIES, resolved.width))
    memory = MemoryCache(state, resolved.window, 1, resolved.signature)
    memory.options = resolved
    memory.timeline.tokens_read = [ENTRIES]
    first = torch.arange(ENTRIES, dtype=torch.int32) * 5
    memory.origin.sources = [Source("random", "word " * ENTRIES, torch.stack([first, first + 4], 1))]
    path = folder / shape
    memory.save(path)
    calls: dict[str, Callable[[], object]] = {
        "save": partial(memory.save, path),
        "load": partial(cacheformers.load_memory, path),
        "mapped": partial(cacheformers.load_memory, path, verify=False),
    }
    times = {name: statistics.median(seconds) for name, seconds in interleaved(calls, REPEATS).items()}
    size = sum(file.stat().st_size for file in path.iterdir())
    return {"shape": shape, "width": resolved.width, "bytes": size, "entry_bytes": memory.state.nbytes, **times}


def asking(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure reading a book and asking about it as processes."""
    text = Path(options.book).read_text()[: options.characters]
    (folder / "book.txt").write_text(text)
    base = AutoModelForCausalLM.from_pretrained(options.base)
    adapter = get_peft_model(base, cacheformers.NeurocacheAdapterConfig(retrieval_map={22: 22}))
    adapter.save_pretrained(str(folder / "adapter"))
    memory, model = folder / "book.memory", ["--adapter", folder / "adapter", "--model", Path(options.base).resolve()]
    ask = partial(run, "ask", memory, options.question, "--max-new-tokens", 30)
    read = partial(run, "read", folder / "book.txt", "-o", memory, *model)
    return {
        "tokens": len(AutoTokenizer.from_pretrained(options.base)(text, verbose=False).input_ids),
        "read": seconds_of(read),
        "ask": statistics.median(seconds_of(ask) for _ in range(3)),
        "memory_bytes": sum(file.stat().st_size for file in memory.iterdir()),
    }


def run(*arguments: object) -> None:
    """Run a command of this package."""
    subprocess.run([sys.executable, "-m", "cacheformers", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    text = "Files are in the page cache. Other jobs may have run on the same cores."
    lines = opening("Memory files: size, loading, and asking against reading again", result, text)
    titles = ["shape", "entry", "folder MiB", "bytes a token", "of them entries", "save s", "load s"]
    rows = [
        [row["shape"], f"{row['width']:,} {SHAPES[row['shape']]}", f"{row['bytes'] / 2**20:.1f}"]
        + [f"{row['bytes'] / ENTRIES:,.1f}", f"{row['entry_bytes'] / ENTRIES:,.0f}"]
        + [f"{row['save']:.2f}", f"{row['load']:.2f}", f"{row['mapped']:.3f}"]
        for row in result["files"]
    ]
    lines += [f"## {ENTRIES:,} entries of one document", "", *table([*titles, "load, verify=False s"], rows)]
    read, ask, tokens = result["read"], result["ask"], result["tokens"]
    lines += [
        f"## Asking against reading again\n\nSmolLM2-135M, {tokens:,} tokens of `{result['settings']['book']}`, 30 new "
        "tokens; seconds of whole processes, imports and loading the model included (asking: median of three).\n",
        *table(
            ["", "s"],
            [
                ["`cacheformers read`", f"{read:.1f}"],
                ["`cacheformers ask`", f"{ask:.1f}"],
                ["reading again and asking, against asking", f"{(read + ask) / ask:.1f} times"],
            ],
        ),
        f"The memory file takes {result['memory_bytes'] / 2**20:.1f} MiB, {result['memory_bytes'] / tokens:,.0f} bytes "
        "a token read.\n",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
