"""Read a million tokens and decode ten thousand more: do memory and time stay flat, and are all numbers finite?

    python benchmarks/soak.py  # Neurocache, both dtypes, on one core: about ten minutes
    python benchmarks/soak.py --method infini_attention --dtype float32
    python benchmarks/soak.py --tokens 60000 --decode 1000 --dtype float32 --output /tmp/soak

The adapter is untrained, but its gates are open and its LoRA is not zero, so that every part of the method runs. Each
of several dtypes runs in a process of its own. Results: soak_METHOD.json, .md and .png in the folder `--output`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import Panel, draw_lines, held, opening, parser, save, table
from models import open_gates
from peft import PeftModel, get_peft_model
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import cacheformers
from cacheformers.common.sources import load_texts
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.method import method_named

SETTLED = 50  # segments after which memory must be flat
SAMPLES = 80  # points of memory use over a phase
METHODS = ("neurocache", "memorizing", "infini_attention")
STORIES_SHAPE = LlamaConfig(  # of stories260K
    vocab_size=512,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__, "")
    given.add_argument("--method", default="neurocache", choices=METHODS)
    given.add_argument("--base", default="../shared/data/models/stories260K-llama", help="random weights where absent")
    given.add_argument("--text", default="../shared/data/books/valid.jsonl.gz", help="random ids where absent")
    given.add_argument("--tokens", type=int, default=1_000_000, help="how many to read")
    given.add_argument("--decode", type=int, default=10_000, help="how many to decode afterwards, one at a time")
    given.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    given.add_argument("--cache_size", type=int, default=4096, help="entries, of methods that retrieve")
    given.add_argument("--segment", type=int, default=256)
    given.add_argument("--threads", type=int, default=1)
    options = given.parse_args()
    results = {}
    for dtype in options.dtype:
        if len(options.dtype) == 1:
            results[dtype] = soak(options, dtype)
        else:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                results[dtype] = pool.apply(soak, (options, dtype))
    samples = {dtype: found.pop("samples") for dtype, found in results.items()}  # the plot shows them
    draw(save(f"soak_{options.method}", options, {"results": results}, page), results, samples)


def open_model(options: argparse.Namespace, dtype: str) -> PeftModel:
    """Build a base with an untrained adapter whose every part shows in the logits; entries have the base's dtype."""
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"segment_tokens": options.segment}
    if options.method != "infini_attention":
        chosen |= {"cache_size": options.cache_size, "cache_dtype": dtype}
    known, kind = Path(options.base).is_dir(), AutoModelForCausalLM
    make, source = (kind.from_pretrained, options.base) if known else (kind.from_config, STORIES_SHAPE)
    base = make(source, dtype=getattr(torch, dtype))
    model = get_peft_model(base, method_named(options.method).adapter_config(**chosen))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02)
    open_gates(model, 0.5)
    return model


def tokens_of(options: argparse.Namespace, vocab_size: int) -> Tensor:
    """Return token ids `[1, tokens]` of the text, repeated where it is too short."""
    if not Path(options.text).is_file() or not Path(options.base).is_dir():
        return torch.randint(3, vocab_size, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    ids: list[int] = []
    for text in load_texts([options.text]):
        for paragraph in (text or "").splitlines(keepends=True):
            ids += tokenizer(paragraph, add_special_tokens=False)["input_ids"]
        if len(ids) >= options.tokens:
            break
    repeats = math.ceil(options.tokens / len(ids))
    return torch.tensor(ids * repeats)[None, : options.tokens]


class Record:
    """Records the time of every step, and the memory use of some."""

    def __init__(self, steps: int, tokens_a_step: int, first_token: int = 0) -> None:
        self.every, self.tokens_a_step, self.first_token = max(steps // SAMPLES, 1), tokens_a_step, first_token
        # Allocated now: lists that grow would show in the memory use.
        self.wall, self.cpu = (array("d", bytes(8 * steps)) for _ in range(2))
        self.memory: list[dict[str, float]] = []
        self.done, self.finite = 0, True

    def step(self, run: Callable[[], Tensor], memory: MemoryCache) -> Tensor:
        """Time one step, check its logits, and sample memory use now and then."""
        wall, cpu = time.perf_counter(), time.process_time()
        logits = run()
        self.wall[self.done] = 1000 * (time.perf_counter() - wall)
        self.cpu[self.done] = 1000 * (time.process_time() - cpu)
        self.done += 1
        self.finite = self.finite and bool(torch.isfinite(logits).all())
        if self.done % self.every == 0 or self.done in (1, SETTLED):
            held_now = memory.state.state_dict().values()
            self.finite = self.finite and all(bool(torch.isfinite(tensor).all()) for tensor in held_now)
            self.memory.append(
                {
                    "step": self.done,
                    "tokens": self.first_token + self.done * self.tokens_a_step,
                    "process_mib": round(held("VmRSS") / 2**20, 2),
                    "memory_kib": round(memory.nbytes / 2**10, 1),
                }
            )
        return logits

    def report(self, settled: int) -> dict[str, Any]:
        """Sum up, with process memory from step `settled` on."""
        after = [sample["process_mib"] for sample in self.memory if sample["step"] >= settled]
        return {
            "steps": self.done,
            "finite": self.finite,
            "process_mib_start_highest_end": [after[0], max(after), after[-1]],
            "memory_kib_end": self.memory[-1]["memory_kib"],
            "wall_ms_median_by_decile": deciles(self.wall),
            "cpu_ms_median_by_decile": deciles(self.cpu),
        }


def deciles(times: Sequence[float]) -> list[float]:
    """Return the median of each tenth of the steps, in order."""
    bounds = [round(tenth * len(times) / 10) for tenth in range(11)]
    parts = [times[start:end] for start, end in zip(bounds, bounds[1:], strict=False) if end > start]
    return [round(statistics.median(part), 3) for part in parts]


@torch.no_grad()
def soak(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Read and decode with one dtype."""
    torch.set_num_threads(options.threads)
    model = open_model(options, dtype)
    ids = tokens_of(options, model.config.vocab_size)
    segments = ids.split(options.segment, dim=1)
    memory = cacheformers.new_memory(model, 1)

    reading = Record(len(segments), options.segment)
    for segment in tqdm(segments, desc=f"Reading, {dtype}", unit=" segments", mininterval=5):
        logits = reading.step(lambda: model(segment, past_key_values=memory).logits, memory)  # noqa: B023

    decoding = Record(options.decode, 1, ids.shape[1])
    generator = torch.Generator().manual_seed(0)
    for _ in tqdm(range(options.decode), desc=f"Decoding, {dtype}", unit=" tokens", mininterval=5):
        token = torch.multinomial(logits[:, -1].float().softmax(-1), 1, generator=generator)
        logits = decoding.step(lambda: model(token, past_key_values=memory).logits, memory)  # noqa: B023
    assert memory.tokens_read == [ids.shape[1] + options.decode]
    return {
        "tokens_read": memory.tokens_read[0],
        "entries": [ring.count(0) for ring in memory.state.rings.values()],
        "reading": reading.report(min(SETTLED, len(segments))),
        "decoding": decoding.report(1),
        "samples": {"reading": reading.memory, "decoding": decoding.memory},
    }


def page(result: dict[str, Any]) -> str:
    """Format the result as a page."""
    chosen = result["settings"]
    base = Path(chosen["base"]).name if Path(chosen["base"]).is_dir() else "random, shape of stories260K"
    source = Path(chosen["text"]).name if Path(chosen["text"]).is_file() else "random ids"
    size = "" if chosen["method"] == "infini_attention" else f"{chosen['cache_size']} entries at most, "
    text = (
        f"Base {base}, text {source}, {size}{chosen['segment']} tokens a segment. Process memory counts from segment "
        f"{SETTLED} while reading, from the first step while decoding; the memory contains the open segment. Times are "
        "medians of the first and the last tenth of the steps; wall times depend on what else was running."
    )
    titles = ["dtype", "phase", "steps", "finite", "process MiB: start, highest, end", "memory KiB"]
    rows = []
    for dtype, found in result["results"].items():
        for phase in ("reading", "decoding"):
            part = found[phase]
            cells = [dtype, phase, f"{part['steps']:,}", "yes" if part["finite"] else "NO"]
            cells.append(", ".join(f"{mib:.1f}" for mib in part["process_mib_start_highest_end"]))
            cells.append(f"{part['memory_kib_end']:,.0f}")
            for times in (part["wall_ms_median_by_decile"], part["cpu_ms_median_by_decile"]):
                cells.append(f"{times[0]:.2f}, {times[-1]:.2f}")
            rows.append(cells)
    lines = opening(f"Soak: long reading and decoding, {chosen['method']}", result, text)
    lines += table([*titles, "wall ms: first, last tenth", "CPU ms: first, last tenth"], rows)
    return "\n".join([*lines, f"![Memory and time](soak_{chosen['method']}.png)", ""])


def draw(path: Path, results: dict[str, Any], samples: dict[str, Any]) -> None:
    """Draw process memory and CPU time of both phases."""
    panels = []
    for phase, step in (("reading", "segment"), ("decoding", "token")):
        left = Panel(f"{phase}: process memory", "thousand tokens", "MiB", {})
        right = Panel(f"{phase}: CPU time a {step}", "tenth of the steps", "ms, median", {})
        for dtype, found in results.items():
            left.lines[dtype] = [(each["tokens"] / 1000, each["process_mib"]) for each in samples[dtype][phase]]
            right.lines[dtype] = [*enumerate(found[phase]["cpu_ms_median_by_decile"], 1)]
        panels.append([left, right])
    draw_lines(path, panels, log=False)


if __name__ == "__main__":
    main()
