"""What a GPU can say, in ten minutes, most needed first: correctness, search, a step of 7B, decoding, a training run.

    python benchmarks/gpu.py                                # with one card; nothing is downloaded
    python benchmarks/gpu.py --device cpu --quick --output runs/gpu     # the same code where there is no GPU, toy sizes

1. Every method on a small random model, on the device and on the CPU: logits after several segments, gradients, tokens.
2. Exact search beside the bare matrix product of the same size, and beside a floor: the longer of the two times that
   its bytes and operations take at the rates of a large copy and a large bfloat16 product. The CPU
   judges what it finds.
3. A training step of a model of Llama-2-7B's shape with random weights, LoRA alone and with a memory: time, peak
   memory, and what `--estimate` says.
4. Segments and new tokens of that model with 16K and 128K entries, beside its base.
5. Ten times the steps of recipes/smollm2_books.yaml, in the time that is left (`--minutes`), if SmolLM2 and the books
   are there.

gpu.json and gpu.md are written after each part, so that what was measured stays if the rest does not finish.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, opening, parser, peak_extra, ratio, save, shown, table
from models import full_memory, lora_model, memory_model, shapes
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import cacheformers
from cacheformers.common.loss import token_losses
from cacheformers.modeling.method import METHODS
from cacheformers.modeling.search import get_search, recall
from cacheformers.modeling.search.store import Entries
from cacheformers.training.estimate import Work, estimate
from cacheformers.training.optim import Rates, make_optimizer

ROOT = Path(__file__).resolve().parents[1]
QUERIES, TOPK, TOKENS = 2048, 16, 1024
SEGMENT = 2048  # of a training step of 7B, as in recipes/llama2_7b_longpile.yaml
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}  # of the largest logit; gradients may differ ten times as much


def main() -> None:
    """Measure, print, write, part by part."""
    given = parser(__doc__, "")
    given.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given.add_argument("--quick", action="store_true", help="toy sizes, to see whether it runs")
    given.add_argument("--rounds", type=int, default=15)
    given.add_argument("--minutes", type=float, default=9.5, help="for all of it (default: %(default)s)")
    given.add_argument("--smollm2", default="data/smollm2-135m-instruct", help="folder (default: %(default)s)")
    options = given.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here. --device cpu --quick runs the same code on toy sizes.")
    start, result = time.perf_counter(), dict[str, Any]()

    def keep(part: str, found: Any) -> None:
        result[part] = found
        result["seconds"] = time.perf_counter() - start
        save("gpu", options, result, page)
        gc.collect()
        torch.cuda.empty_cache()

    keep("correct", [row for name in METHODS for row in correct(name, options)])
    keep("rates", measured_rates(options))
    sizes = [(4096, 64)] if options.quick else [(131072, 256), (131072, 1024), (16384, 256)]
    keep("search", [search(count, width, result["rates"], options) for count, width in sizes])
    keep("step", [step(kind, options) for kind in ("lora", "neurocache")])
    caches = [2048] if options.quick else [16384, 131072]
    keep("forward", [forward(shape_name(options), cache, options) for cache in caches])
    keep("smollm2", train_smollm2(options, 60 * options.minutes - result["seconds"]))


def shape_name(options: argparse.Namespace) -> str:
    """Return the name of the model whose time and memory are measured."""
    return "smollm2-135m" if options.quick else "llama-2-7b"


def correct(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare a method on the device with the CPU, in float32 and bfloat16, on a small random model with open gates."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    method = METHODS[name]
    settings: Any = {"segment_tokens": 64, **method.test_settings, "r": 4, "task_type": "CAUSAL_LM"}
    rows = []
    for kind in BOUNDS:
        here: Any = get_peft_model(
            AutoModelForCausalLM.from_config(config, dtype=getattr(torch, kind)), method.adapter_config(**settings)
        )
        for parameter in here.parameters():
            if parameter.requires_grad and parameter.dim() < 2:
                parameter.data.normal_(0, 0.5)  # gates; they are closed at first
        there = copy.deepcopy(here).to(options.device)
        ids = torch.randint(3, 512, (2, 300))
        (logits, gradients, tokens), (own, own_gradients, own_tokens) = (
            behavior(model, ids.to(device)) for model, device in ((here, "cpu"), (there, options.device))
        )
        row: dict[str, Any] = {"method": name, "dtype": kind, "logits": difference(own, logits)}
        row["gradients"] = difference(own_gradients, gradients)
        row["tokens"] = bool((tokens == own_tokens).all())
        row["within"] = row["logits"] <= BOUNDS[kind] and row["gradients"] <= 10 * BOUNDS[kind]
        print(f"{name}, {kind}: logits {row['logits']:.1e}, gradients {row['gradients']:.1e}, tokens {row['tokens']}")
        rows.append(row)
    return rows


def behavior(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits after a text that was read, the gradients of two segments, and tokens generated from the memory."""
    model.eval()
    with torch.no_grad():
        memory = cacheformers.read(model, ids[:, :256], progress=False)
        logits = model(ids[:, 256:], past_key_values=memory.clone()).logits
        asked = {"input_ids": ids[:, 256:], "attention_mask": torch.ones_like(ids[:, 256:]), "pad_token_id": 0}
        tokens = model.generate(**asked, past_key_values=memory, max_new_tokens=8, do_sample=False)
    model.train()
    output = model(ids[:, :128], use_cache=False)
    token_losses(output.logits, ids[:, :128]).mean().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return logits.float().cpu(), torch.cat([grad.flatten() for grad in trained]).float().cpu(), tokens.cpu()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def step(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a training step with activation checkpointing, of LoRA alone or with a memory that is full."""
    shape = shapes()[shape_name(options)]
    tokens = 128 if options.quick else SEGMENT
    model: Any = (
        lora_model(shape, torch.bfloat16, options.device)
        if kind == "lora"
        else memory_model(
            shape, torch.bfloat16, options.device, segment_tokens=tokens, cache_size=1024 if options.quick else 16384
        )
    )
    memory = None if kind == "lora" else full_memory(model.train())
    model.train()
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    model.base_model.model.disable_input_require_grads()
    optimizer = make_optimizer(model, Rates(1e-4, 1e-4, 1e-4), "adamw")
    ids, targets = torch.randint(0, shape.config.vocab_size, (2, 1, tokens), device=options.device)

    def run() -> None:
        output = model(input_ids=ids, past_key_values=memory, use_cache=memory is not None)
        token_losses(output.logits, targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    held = sum(parameter.nbytes for parameter in model.parameters())
    extra = peak_extra(run, options.device)
    times = interleaved({"step": run}, 2 if options.quick else 5, options.device)["step"]
    work = Work(1, tokens, activation_checkpointing=True, device_type=options.device)
    told = estimate(shape.config, model.active_peft_config, work).peak
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    found: dict[str, Any] = {"model": shape_name(options), "kind": kind, "tokens": tokens}
    found["seconds"] = statistics.median(times)
    found |= {"weights_bytes": held, "extra_bytes": extra, "peak_bytes": peak, "estimate_bytes": told}
    print(f"{kind}: {found['seconds']:.2f} s a step, peak {peak / 2**30:.2f} GiB, estimate {told / 2**30:.2f} GiB")
    return found


def train_smollm2(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run the recipe of books with ten times its steps, for as many seconds as are left; what its result says."""
    books = ROOT.parent / "shared/data/books/train.jsonl.gz"
    steps, least = (2, 0) if options.quick else (4000, 60)
    if not Path(options.smollm2).is_dir() or not books.exists() or seconds < least:
        return {"left_out": f"{options.smollm2} or {books} is missing, or no minute was left"}
    output = Path("runs/gpu_smollm2")
    recipe = [
        str(ROOT / "recipes/smollm2_books.yaml"),
        "--base",
        options.smollm2,
        "--output",
        str(output),
        "--overwrite",
    ]
    more = ["--steps", str(steps), "--stop_after", f"{max(seconds - 45, 1) / 60:.2f}", "--train", str(books)]
    if options.quick:
        more += ["--segment_tokens", "64", "--device", "cpu", "--start_segments", "40", "--valid_tokens", "256"]
    begun = time.perf_counter()
    command = [sys.executable, str(ROOT / "train_adapt.py"), *recipe, *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return {
        "command": " ".join(["python", "train_adapt.py", *command[2:]]),
        "status": done.returncode,
        "seconds": time.perf_counter() - begun,
        "last_lines": done.stdout.splitlines()[-12:],
    }


def measured_rates(options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes per second of a copy, and the operations per second of a bfloat16 product."""
    size = 256 if options.quick else 8192
    a, b = (torch.randn(size, size, device=options.device).bfloat16() for _ in range(2))
    out, large = torch.empty_like(a), torch.empty(size, 8 * size, device=options.device)
    other = torch.empty_like(large)
    runs = {"copy": lambda: other.copy_(large), "product": lambda: torch.mm(a, b, out=out)}
    times = {name: statistics.median(taken) for name, taken in interleaved(runs, 9, options.device).items()}
    return {"copy": 2 * large.nbytes / times["copy"], "product": 2 * size**3 / times["product"]}


@torch.no_grad()
def search(count: int, width: int, rates: dict[str, float], options: argparse.Namespace) -> dict[str, Any]:
    """Measure exact search of a bfloat16 store beside the bare product (bfloat16 in and out) of the same size."""
    stored = torch.nn.functional.normalize(torch.randn(count, width, device=options.device), dim=1).bfloat16()
    queries = torch.nn.functional.normalize(torch.randn(QUERIES, width, device=options.device), dim=1)
    entries, exact, asked = Entries((stored,)), get_search("exact"), queries.bfloat16()
    out = torch.empty(QUERIES, count, dtype=torch.bfloat16, device=options.device)
    runs = {
        "search": lambda: exact(queries, entries, TOPK, "l2"),
        "product": lambda: torch.mm(asked, stored.T, out=out),
    }
    extra = peak_extra(runs["search"], options.device)
    times = interleaved(runs, options.rounds, options.device)
    least = max((stored.nbytes + queries.nbytes) / rates["copy"], 2 * QUERIES * count * width / rates["product"])
    _, hits = exact(queries[:64], entries, TOPK, "l2")
    found = recall(hits.cpu(), queries[:64].cpu(), Entries((stored.cpu(),)), TOPK, "l2")
    row: dict[str, Any] = {"entries": count, "width": width, **ratio(times, "search", "product"), "times": times}
    row |= {"over": "torch.mm, bfloat16 output", "floor_seconds": least, "extra_bytes": extra, "recall": found}
    print(
        f"search {QUERIES:,} x {count:,} x {width}: {shown(row)} of the product, {row['seconds'] / least:.1f} of the "
        f"floor, {extra / 2**20:.0f} MiB, recall {found:.4f}"
    )
    return row


@torch.no_grad()
def forward(name: str, cache_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a segment through a random base with a memory and with its adapter off; and a new token."""
    shape = shapes()[name]
    model: Any = memory_model(shape, torch.bfloat16, options.device, lora=False, cache_size=cache_size)
    memory = full_memory(model)
    ids = torch.randint(0, shape.config.vocab_size, (1, TOKENS), device=options.device)

    def base() -> None:
        with model.disable_adapter():
            model(input_ids=ids, use_cache=True)

    def base_token() -> None:
        with model.disable_adapter():
            model(input_ids=ids[:, :1], use_cache=True)

    runs = {
        "memory": lambda: model(input_ids=ids, past_key_values=memory),
        "base": base,
        "token": lambda: model(input_ids=ids[:, :1], past_key_values=memory),
        "base token": base_token,
    }
    extra = peak_extra(runs["memory"], options.device)
    times = interleaved(runs, options.rounds, options.device)
    row: dict[str, Any] = {"model": name, "cache_size": cache_size, **ratio(times, "memory", "base")}
    row |= {"extra_bytes": extra, "times": times}
    row |= {
        f"{name}_seconds": statistics.median(times[run])
        for name, run in (("token", "token"), ("base_token", "base token"))
    }
    print(f"{name}, {cache_size:,} entries: {shown(row)} of the base, {1000 * row['token_seconds']:.1f} ms a token")
    return row


def page(result: dict[str, Any]) -> str:
    """Return the Markdown page of the parts that are done."""
    lines = opening(
        "What a GPU says", result, f"Device: {result['about']['device']}. {result['seconds']:.0f} s so far."
    )
    if "correct" in result:
        rows = [
            [f"{row['method']}, {row['dtype']}", f"{row['logits']:.1e}", f"{row['gradients']:.1e}", str(row["tokens"])]
            for row in result["correct"]
        ]
        wrong = [f"{row['method']} {row['dtype']}" for row in result["correct"] if not row["within"]]
        lines += ["## Against the CPU", "", f"Not within {BOUNDS}: {', '.join(wrong) or 'none'}.", ""]
        lines += table(["method", "logits", "gradients", "same tokens"], rows)
    if "search" in result:
        lines += ["## Search", ""]
        rows = [
            [
                f"{row['entries']:,} x {row['width']}",
                shown(row),
                f"{row['seconds'] / row['floor_seconds']:.1f}",
                f"{row['recall']:.4f}",
            ]
            for row in result["search"]
        ]
        lines += table(["entries", "over torch.mm", "over the floor", "recall"], rows)
    if "step" in result:
        lines += ["## A training step", ""]
        rows = [
            [
                f"{row['model']}, {row['kind']}, {row['tokens']} tokens",
                f"{row['seconds']:.2f}",
                *(f"{row[name] / 2**30:.2f}" for name in ("weights_bytes", "peak_bytes", "estimate_bytes")),
            ]
            for row in result["step"]
        ]
        lines += table(["model", "seconds", "weights GiB", "peak GiB", "estimate GiB"], rows)
    if "forward" in result:
        lines += ["## Reading and decoding", ""]
        rows = [
            [
                f"{row['model']}, {row['cache_size']:,} entries",
                shown(row),
                f"{1000 * row['token_seconds']:.1f}",
                f"{1000 * row['base_token_seconds']:.1f}",
            ]
            for row in result["forward"]
        ]
        lines += table(["model", "segment over the base", "ms a token", "base's"], rows)
    if "smollm2" in result:
        lines += ["## SmolLM2, ten times the steps", ""]
        found = result["smollm2"]
        told = found.get("last_lines") or [found["left_out"]]
        lines += ["```", *told, "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
