"""Compare the speed of two commits: forward, training step and decoding of every method, and the import.

    git worktree add --detach ../before COMMIT && make -C ../before install
    taskset -c 1 python benchmarks/two_commits.py ../before .                      # 30 minutes on one core
    taskset -c 1 python benchmarks/two_commits.py ../before . --methods neurocache --rounds 5 --starts 2

Each checkout computes in a process with its own `.venv`. The two take turns, a run each, so that other load meets both
alike, and processes may start anew, because memory layout differs from start to start. Times are the process's own
CPU time; a ratio is of two runs of the same round. The base is a Llama with random weights (`--base`: a folder with
another). Result: two_commits.json, and the table that is printed.

forward: 2,048 tokens; train: forward and backward of 1,024; decode: `generate()` of 64 tokens after a text of 1,024;
operations: calls of torch operations for one of these 64 tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NEW_TOKENS = 64
# Small enough for several segments, full rings and far blocks.
SETTINGS: dict[str, dict[str, Any]] = {
    "Neurocache": {"segment_tokens": 512, "cache_size": 1024},
    "Memorizing": {"segment_tokens": 512, "cache_size": 1024},
    "InfiniAttention": {"segment_tokens": 512},
    "GatedAttention": {"window_tokens": 256},
    "CacheFormer": {},
    "Windowed": {"segment_tokens": 512},
}
TASKS = ("forward", "train", "decode", "operations")


def main() -> None:
    """Measure and write the table, or serve one checkout's side of it."""
    if sys.argv[1:2] == ["--serve"]:
        return serve(*sys.argv[2:])
    from measuring import parser

    given = parser(__doc__)
    given.add_argument("before", type=Path, help="checkout of the old commit, with its .venv")
    given.add_argument("after", type=Path, help="checkout of the new commit, with its .venv")
    given.add_argument("--methods", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="METHOD")
    given.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    given.add_argument("--base", default="", help="folder of a base model (default: a Llama of 8 layers of 256)")
    given.add_argument("--rounds", type=int, default=7, help="of each start")
    given.add_argument("--starts", type=int, default=4)
    options = given.parse_args()
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Measure everything in turn; print and write it."""
    from measuring import save, shown, table

    checkouts = {"before": options.before, "after": options.after}
    cases = [(method, task) for method in options.methods for task in options.tasks]
    times: dict[tuple[str, str], dict[str, list[float]]] = {case: {side: [] for side in checkouts} for case in cases}
    for _ in range(options.starts):
        sides = {side: Side(path, options.base) for side, path in checkouts.items()}
        for method, task in cases:
            for _ in range(1 if task == "operations" else options.rounds):
                for side, process in sides.items():
                    times[method, task][side].append(process.run(method, task))
            row(method, task, times[method, task])
        for process in sides.values():
            process.end()
    rows = [row(*case, times[case]) for case in cases]
    imports: dict[str, list[float]] = {side: [] for side in checkouts}
    for _ in range(options.starts * options.rounds):
        for side, path in checkouts.items():
            imports[side].append(import_seconds(path))
    rows.append(row("", "import", imports))
    commits = {side: commit(path) for side, path in checkouts.items()}
    options.before, options.after = "../before", "."
    save("two_commits", options, {"commits": commits, "rows": rows})
    cells = [
        [line["method"] or "all", line["task"], number(line["before"]), number(line["after"]), shown(line, 3)]
        for line in rows
    ]
    print("\n".join(table(["method", "task", "before", "after", "after over before"], cells)))


def row(method: str, task: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return one line of the table: medians, and the ratio of runs of the same round with its middle half."""
    import statistics

    from measuring import ratio, shown

    found = ratio(times, "after", "before")
    before = statistics.median(times["before"])
    line = {"method": method, "task": task, "before": before, "after": found.pop("seconds"), **found}
    print(f"{method} {task}: {shown(line, 3)} of {before:.3f}", flush=True)
    return line


def number(value: float) -> str:
    """Format seconds or a count."""
    return f"{value:,.0f}" if value > 100 else f"{value:.3f} s"


def commit(checkout: Path) -> str:
    """Return the commit of a checkout."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def import_seconds(checkout: Path) -> float:
    """Return the CPU seconds of a fresh process that imports the package."""
    code = "import time, cacheformers; print(time.process_time())"
    command = [str(checkout / ".venv/bin/python"), "-c", code]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment()).stdout)


def environment() -> dict[str, str]:
    """Return the environment of a side: one thread, and no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Side:
    """A process of one checkout, which runs a task whenever it is asked to."""

    def __init__(self, checkout: Path, base: str) -> None:
        command = [str(checkout / ".venv/bin/python"), str(Path(__file__).resolve()), "--serve", base]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process: Any = subprocess.Popen(command, **pipes, text=True, env=environment())  # type: ignore[call-overload]  # of pipes by name

    def run(self, method: str, task: str) -> float:
        """Return a task's CPU seconds, or number of operations."""
        self.process.stdin.write(f"{method} {task}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def serve(base: str = "") -> None:
    """Run each method's task that is named on the standard input, and print what it took; a first run is not timed."""
    made = ""
    runs: dict[str, Callable[[], float | None]] = {}
    warm: set[str] = set()
    for line in sys.stdin:
        method, task = line.split()
        if method != made:
            made, runs, warm = method, tasks(method, base), {"operations"}
        if task not in warm:
            runs[task]()
            warm.add(task)
        start = time.process_time()
        result = runs[task]()
        print(time.process_time() - start if result is None else result, flush=True)


def tasks(method: str, base: str) -> dict[str, Callable[[], float | None]]:
    """Return the tasks of a method by name."""
    import transformers
    from peft import get_peft_model

    import cacheformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain: Any = transformers.LlamaForCausalLM(small_llama()) if not base else None
    plain = plain or transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = getattr(cacheformers, f"{method}AdapterConfig")(**SETTINGS[method], task_type="CAUSAL_LM")
    model: Any = get_peft_model(plain, config)
    ids = torch.randint(3, plain.config.vocab_size, (1, 2048))
    text, question = ids[:, :1024], ids[:, -8:]

    @torch.no_grad()
    def forward() -> None:
        model.eval()(input_ids=ids)

    def train() -> None:
        model.train()(input_ids=text, labels=text).loss.backward()
        model.zero_grad(set_to_none=True)

    memory = cacheformers.read(model.eval(), text, progress=False)
    choices = {"do_sample": False, "pad_token_id": 0}

    def decode(tokens: int = NEW_TOKENS) -> None:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.eval().generate(question, past_key_values=memory.clone(), **length, **choices)

    def operations() -> float:
        counts = []
        for tokens in (1, NEW_TOKENS + 1):
            with Operations() as counted, torch.no_grad():
                decode(tokens)
            counts.append(counted.calls)
        return (counts[1] - counts[0]) / NEW_TOKENS

    return {"forward": forward, "train": train, "decode": decode, "operations": operations}


def small_llama() -> Any:
    """Return the configuration of a Llama in which the package's own work is a visible part."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    return LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=4096, max_position_embeddings=4096)


class Operations(TorchDispatchMode):
    """Counts calls of torch operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


if __name__ == "__main__":
    main()
