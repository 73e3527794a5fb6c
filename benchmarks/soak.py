"""Read a million tokens and decode ten thousand more: do memory and time stay flat, and are all numbers finite?

    python benchmarks/soak.py  # Neurocache, both dtypes, on one core: about ten minutes
    python benchmarks/soak.py --method infini_attention --dtype float32
    python benchmarks/soak.py --tokens 60000 --decode 1000 --dtype float32 --out /tmp/soak

The adapter is untrained, but its gates are open and its LoRA is not zero, so that every part of the method runs. Each
of several dtypes runs in a process of its own. Results: soak_METHOD.json, .md and .png in the folder `--out`.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import math
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

import cacheformers
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memories.infini_attention import InfiniState

ROOT = Path(__file__).resolve().parents[1]
SETTLED = 50  # segments after which memory must be flat
SAMPLES = 80  # points of memory use over a phase
METHODS = {
    "neurocache": cacheformers.NeurocacheAdapterConfig,
    "memorizing": cacheformers.MemorizingAdapterConfig,
    "infini_attention": cacheformers.InfiniAttentionAdapterConfig,
}
STORIES_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="neurocache", choices=METHODS)
    parser.add_argument("--base", default="../shared/data/models/stories260K-llama", help="random weights where absent")
    parser.add_argument("--text", default="../shared/data/books/valid.jsonl.gz", help="random ids where absent")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="how many to read")
    parser.add_argument("--decode", type=int, default=10_000, help="how many to decode afterwards, one at a time")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--cache-size", type=int, default=4096, help="entries, of methods that retrieve")
    parser.add_argument("--segment", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    return parser.parse_args()


def load_base(path: str, dtype: torch.dtype) -> PreTrainedModel:
    if Path(path).is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return AutoModelForCausalLM.from_config(LlamaConfig(**STORIES_SHAPE), dtype=dtype)


def open_model(arguments: argparse.Namespace, dtype: str) -> PeftModel:
    """A base with an untrained adapter whose every part shows in the logits; entries have the base's dtype."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"segment_tokens": arguments.segment}
    if arguments.method != "infini_attention":
        options |= {"cache_size": arguments.cache_size, "cache_dtype": dtype}
    config = METHODS[arguments.method](**options)
    model = get_peft_model(load_base(arguments.base, getattr(torch, dtype)), config)
    for name, parameter in model.named_parameters():
        if "lora_mem_gate" in name:
            parameter.data.fill_(0.5)
        elif "lora_B" in name:
            parameter.data.normal_(0, 0.02)
    return model.eval()


def tokens_of(arguments: argparse.Namespace, vocab_size: int) -> Tensor:
    """Token ids `[1, tokens]` of the text, repeated where it is too short."""
    path = Path(arguments.text)
    if not path.is_file() or not Path(arguments.base).is_dir():
        return torch.randint(3, vocab_size, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    ids: list[int] = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"] if ".jsonl" in path.name else line
            for paragraph in text.splitlines(keepends=True):
                ids += tokenizer(paragraph, add_special_tokens=False)["input_ids"]
            if len(ids) >= arguments.tokens:
                break
    repeats = math.ceil(arguments.tokens / len(ids))
    return torch.tensor(ids * repeats)[None, : arguments.tokens]


def stored(memory: MemoryCache) -> list[Tensor]:
    """What a memory keeps of closed segments: entries, or M and z."""
    state = memory.state
    if isinstance(state, InfiniState):
        return [tensor for held in state.held.values() for tensor in (held.matrix, held.norm)]
    return [tensor for ring in state.rings.values() for tensor in (ring.keys, ring.values) if tensor is not None]


class Record:
    """Time of every step, and memory use now and then."""

    def __init__(self, steps: int, tokens_a_step: int, first_token: int = 0) -> None:
        self.every = max(steps // SAMPLES, 1)
        self.tokens_a_step, self.first_token = tokens_a_step, first_token
        self.done = 0
        self.wall = array("d", bytes(8 * steps))  # allocated now: lists that grow would show in the memory use
        self.cpu = array("d", bytes(8 * steps))
        self.memory: list[dict[str, float]] = []
        self.finite = True
        self.process = psutil.Process()

    def step(self, run: Callable[[], Tensor], memory: MemoryCache) -> Tensor:
        """Time one step, check its logits, and look at memory if it is time to."""
        wall, cpu = time.perf_counter(), time.process_time()
        logits = run()
        self.wall[self.done] = 1000 * (time.perf_counter() - wall)
        self.cpu[self.done] = 1000 * (time.process_time() - cpu)
        self.done += 1
        self.finite = self.finite and bool(torch.isfinite(logits).all())
        if self.done % self.every == 0 or self.done in (1, SETTLED):
            store = stored(memory)
            self.finite = self.finite and all(bool(torch.isfinite(tensor).all()) for tensor in store)
            self.memory.append(
                {
                    "step": self.done,
                    "tokens": self.first_token + self.done * self.tokens_a_step,
                    "process_mib": round(self.process.memory_info().rss / 2**20, 2),
                    "store_kib": round(sum(tensor.nbytes for tensor in store) / 2**10, 1),
                    "memory_kib": round(memory.nbytes / 2**10, 1),
                }
            )
        return logits

    def report(self, settled: int) -> dict[str, Any]:
        after = [sample["process_mib"] for sample in self.memory if sample["step"] >= settled]
        return {
            "steps": self.done,
            "finite": self.finite,
            "process_mib_start_highest_end": [after[0], max(after), after[-1]],
            "store_kib_end": self.memory[-1]["store_kib"],
            "memory_kib_end": self.memory[-1]["memory_kib"],
            "wall_ms_median_by_decile": deciles(self.wall),
            "cpu_ms_median_by_decile": deciles(self.cpu),
            "memory": self.memory,
        }


def deciles(times: Sequence[float]) -> list[float]:
    """Median of each tenth of the steps, in order."""
    bounds = [round(tenth * len(times) / 10) for tenth in range(11)]
    parts = [times[start:end] for start, end in zip(bounds, bounds[1:], strict=False) if end > start]
    return [round(statistics.median(part), 3) for part in parts]


@torch.no_grad()
def soak(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Read and decode with one dtype."""
    torch.set_num_threads(arguments.threads)
    model = open_model(arguments, dtype)
    ids = tokens_of(arguments, model.config.vocab_size)
    segments = ids.split(arguments.segment, dim=1)
    memory = cacheformers.new_memory(model, 1)

    reading = Record(len(segments), arguments.segment)
    for segment in tqdm(segments, desc=f"Reading, {dtype}", unit=" segments", mininterval=5):
        logits = reading.step(lambda: model(segment, past_key_values=memory).logits, memory)  # noqa: B023

    decoding = Record(arguments.decode, 1, ids.shape[1])
    generator = torch.Generator().manual_seed(0)
    for _ in tqdm(range(arguments.decode), desc=f"Decoding, {dtype}", unit=" tokens", mininterval=5):
        token = torch.multinomial(logits[:, -1].float().softmax(-1), 1, generator=generator)
        logits = decoding.step(lambda: model(token, past_key_values=memory).logits, memory)  # noqa: B023
    assert memory.tokens_read == [ids.shape[1] + arguments.decode]
    return {
        "tokens_read": memory.tokens_read[0],
        "entries": [ring.count(0) for ring in memory.state.rings.values()],
        "reading": reading.report(min(SETTLED, len(segments))),
        "decoding": decoding.report(1),
    }


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def circumstances(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    commit = git("rev-parse", "--short", "HEAD") or "none yet"
    if git("status", "--porcelain", "--", "modeling", "adapters", "benchmarks/soak.py"):
        commit += " with uncommitted changes"
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return {
        "command": shlex.join(["python", "benchmarks/soak.py", *sys.argv[1:]]),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {math.ceil(psutil.virtual_memory().total / 2**30)} GiB",
        "versions": ", ".join(" ".join(pair) for pair in versions.items()),
        "base": Path(arguments.base).name if Path(arguments.base).is_dir() else "random, shape of stories260K",
        "text": Path(arguments.text).name if Path(arguments.text).is_file() else "random ids",
        "method": arguments.method,
        **({} if arguments.method == "infini_attention" else {"cache_size": arguments.cache_size}),
        "segment_tokens": arguments.segment,
        "threads": arguments.threads,
    }


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write everything but the samples of process memory, which the plot shows."""
    results = {
        dtype: {
            key: {name: value for name, value in part.items() if name != "memory"} if isinstance(part, dict) else part
            for key, part in result.items()
        }
        for dtype, result in report["results"].items()
    }
    path.write_text(json.dumps({**report, "results": results}) + "\n", encoding="utf-8")


def write_markdown(report: dict[str, Any], path: Path) -> None:
    about = report["circumstances"]
    size = f"m = {about['cache_size']:,}, " if "cache_size" in about else ""
    lines = [
        f"# Soak: long reading and decoding, {about['method']}",
        "",
        f"`{about['command']}`",
        "",
        f"Commit {about['commit']}, {about['date']}; {about['machine']}, threads: {about['threads']}; "
        f"{about['versions']}. Base {about['base']}, text {about['text']}, {size}"
        f"{about['segment_tokens']} tokens a segment. Process memory counts from segment {SETTLED} while reading, from "
        "the first step while decoding; the store is what is kept of closed segments, the whole memory has the "
        "open one too. "
        "Times are medians of the first and the last tenth of the steps; wall times depend on what else was running.",
        "",
        "| dtype | phase | steps | finite | process MiB: start, highest, end | store KiB | whole memory KiB "
        "| wall ms: first, last tenth | CPU ms: first, last tenth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype, result in report["results"].items():
        for phase in ("reading", "decoding"):
            part = result[phase]
            start, highest, end = part["process_mib_start_highest_end"]
            wall, cpu = part["wall_ms_median_by_decile"], part["cpu_ms_median_by_decile"]
            cells = [
                dtype,
                phase,
                f"{part['steps']:,}",
                "yes" if part["finite"] else "NO",
                f"{start:.1f}, {highest:.1f}, {end:.1f}",
                f"{part['store_kib_end']:,.0f}",
                f"{part['memory_kib_end']:,.0f}",
                f"{wall[0]:.2f}, {wall[-1]:.2f}",
                f"{cpu[0]:.2f}, {cpu[-1]:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join([*lines, "", f"![Memory and time]({path.stem}.png)", ""]), encoding="utf-8")


def plot(report: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6))
    for row, phase in zip(axes, ("reading", "decoding"), strict=True):
        for dtype, result in report["results"].items():
            part = result[phase]
            tokens = [sample["tokens"] / 1000 for sample in part["memory"]]
            row[0].plot(tokens, [sample["process_mib"] for sample in part["memory"]], label=dtype)
            row[1].plot(range(1, 11), part["cpu_ms_median_by_decile"], marker="o", label=dtype)
        step = "segment" if phase == "reading" else "token"
        row[0].set(title=f"{phase}: process memory", xlabel="thousand tokens", ylabel="MiB")
        row[1].set(title=f"{phase}: CPU time a {step}", xlabel="tenth of the steps", ylabel="ms, median")
        for axis in row:
            axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
            axis.grid(alpha=0.3)
            axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out / f"soak_{arguments.method}"
    report: dict[str, Any] = {"circumstances": circumstances(arguments), "results": {}}
    for dtype in arguments.dtype:
        if len(arguments.dtype) == 1:
            report["results"][dtype] = soak(arguments, dtype)
        else:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                report["results"][dtype] = pool.apply(soak, (arguments, dtype))
        write_json(report, out.with_suffix(".json"))
        write_markdown(report, out.with_suffix(".md"))
        plot(report, out.with_suffix(".png"))
    print(out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
