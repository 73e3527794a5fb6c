"""How large memory files are, how fast they load, and how much faster `ask` is than reading a book again.

    python benchmarks/memory_files.py                                  # all of Hamlet: a quarter of an hour on one core
    python benchmarks/memory_files.py --characters 22000 --out /tmp/memory_files.md

Two parts. First, memories of 131,072 entries, of random numbers (what they are makes no difference to a file), with a
text of five characters a token. Then the commands themselves on SmolLM2-135M with a new adapter: `cacheformers read`,
and `cacheformers ask` in a process of its own, for a memory file asked often and for one that is read anew each time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import cacheformers
from cacheformers.common.environment import environment
from cacheformers.modeling.attach import base_shape
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.origin import Source

ROOT = Path(__file__).resolve().parents[1]
ENTRIES, REPEATS = 131_072, 5
SHAPES = {"smollm2-135m": "float32", "llama-2-7b": "bfloat16"}
HEADER = """# Memory files: size, loading, and asking against reading again

`{command}`

{about}

"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="data/smollm2-135m-instruct")
    parser.add_argument("--book", default="data/plays/valid/hamlet.md")
    parser.add_argument("--characters", type=int, help="read only so much of the book")
    parser.add_argument("--question", default="Who killed Hamlet's father?")
    parser.add_argument("--out", default="docs/results/memory_files.md")
    options = parser.parse_args()
    torch.set_num_threads(1)

    facts = environment(torch.device("cpu"))
    about = (
        f"Commit {facts['commit']}, {facts['date'][:10]}; {facts['machine']}; Python {platform.python_version()}, "
        f"torch {torch.__version__}. Files are in the page cache. Other jobs may have run on the same cores."
    )
    command = " ".join(["python benchmarks/memory_files.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as scratch:
        report = HEADER.format(command=command, about=about) + sizes(Path(scratch)) + asking(Path(scratch), options)
    Path(options.out).write_text(report)
    print(report)


def sizes(folder: Path) -> str:
    """The table of large memories."""
    lines = [
        f"## {ENTRIES:,} entries of one document\n",
        "| shape | entry | folder MiB | bytes a token | of them entries | save s | load s | load, verify=False s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, dtype in SHAPES.items():
        path, memory = folder / shape, random_memory(shape, dtype)
        save = median(partial(memory.save, path))
        load = median(partial(cacheformers.load_memory, path))
        mapped = median(partial(cacheformers.load_memory, path, verify=False))
        size = sum(file.stat().st_size for file in path.iterdir())
        ring = next(iter(memory.state.rings.values()))
        lines.append(
            f"| {shape} | {ring.keys.shape[2]:,} {dtype} | {size / 2**20:.1f} | {size / ENTRIES:,.1f} | "
            f"{memory.state.nbytes / ENTRIES:,.0f} | {save:.2f} | {load:.2f} | {mapped:.3f} |"
        )
    return "\n".join(lines) + "\n\n"


def random_memory(shape: str, dtype: str) -> MemoryCache:
    """As if a document of as many tokens had been read."""
    config = AutoConfig.from_pretrained(ROOT / "recipes" / "base_configs" / shape)
    adapter = cacheformers.NeurocacheAdapterConfig(cache_size=ENTRIES, cache_dtype=dtype)
    options = adapter.resolve(base_shape(config))
    devices = dict.fromkeys(options.layers, torch.device("cpu"))
    state = options.new_state(1, devices, torch.float32, keep_values=False)
    for ring in state.rings.values():
        ring.append(0, torch.randn(ENTRIES, options.width))
    memory = MemoryCache(state, options.window, 1, options.signature)
    memory.options = options
    memory.timeline.tokens_read = [ENTRIES]
    first = torch.arange(ENTRIES, dtype=torch.int32) * 5
    memory.origin.sources = [Source("random", "word " * ENTRIES, torch.stack([first, first + 4], 1))]
    return memory


def median(action: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def asking(folder: Path, options: argparse.Namespace) -> str:
    """Reading and asking as processes."""
    text = Path(options.book).read_text()[: options.characters]
    (folder / "book.txt").write_text(text)
    tokens = len(AutoTokenizer.from_pretrained(options.base)(text, verbose=False).input_ids)
    base = AutoModelForCausalLM.from_pretrained(options.base)
    adapter = get_peft_model(base, cacheformers.NeurocacheAdapterConfig(retrieval_map={22: 22}))
    adapter.save_pretrained(str(folder / "adapter"))
    memory = folder / "book.memory"
    read = wall(
        "read",
        folder / "book.txt",
        "-o",
        memory,
        "--adapter",
        folder / "adapter",
        "--model",
        Path(options.base).resolve(),
    )
    asked = [wall("ask", memory, options.question, "--max-new-tokens", 30) for _ in range(3)]
    ask = statistics.median(asked)
    size = sum(file.stat().st_size for file in memory.iterdir())
    return (
        f"## Asking against reading again\n\nSmolLM2-135M, {tokens:,} tokens of `{options.book}`, 30 new tokens; "
        "seconds of whole processes, imports and loading the model included (asking: median of three).\n\n"
        f"| | s |\n|---|---|\n| `cacheformers read` | {read:.1f} |\n| `cacheformers ask` | {ask:.1f} |\n"
        f"| reading again and asking, against asking | {(read + ask) / ask:.1f} times |\n\n"
        f"The memory file takes {size / 2**20:.1f} MiB, {size / tokens:,.0f} bytes a token read.\n"
    )


def wall(*arguments: object) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "cacheformers", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
