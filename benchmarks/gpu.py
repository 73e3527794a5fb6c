"""What a GPU can say, in ten minutes, most needed first: correctness, search, a step of 7B, decoding, a training run.

    python benchmarks/gpu.py                                            # with one card; nothing is downloaded
    python benchmarks/gpu.py --parts smollm2 --minutes 25               # one part again, or with more time; others stay
    python benchmarks/gpu.py --device cpu --quick --output runs/gpu     # the same code where there is no GPU, toy sizes

correct: every method on a small random model, on the device and on the CPU: logits after several segments, gradients,
tokens. Both are compared with the CPU in float64, and the device may err as the CPU does, up to a factor.
search: exact search beside the bare matrix product of the same size, and beside a floor: the longer of the two times
that its bytes and operations take at the rates of a large copy and a large bfloat16 product. The CPU judges what it
finds.
step: a training step of a model of Llama-2-7B's shape with random weights, LoRA alone and with a memory: time, peak
memory, and what `--estimate` says.
decode: segments and new tokens of that model with 16K and 128K entries, beside its base.
smollm2: ten times the steps of recipes/smollm2_books.yaml, or as many as fit into the minutes that are left, counted by
a run of 20 steps; held-out perplexity. SmolLM2 and the books must be there.

gpu.json and gpu.md are written after each part, so what was measured stays if the rest does not finish. A part that
fails is named there, and the next one begins.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, opening, parser, peak_extra, ratio, save, shown, table
from models import Shape, full_memory, lora_model, memory_model, shapes
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import cacheformers
from cacheformers.common.base_model import checkpoint_activations
from cacheformers.common.loss import token_losses
from cacheformers.modeling.method import METHODS
from cacheformers.modeling.search import get_search, recall
from cacheformers.modeling.search.store import Entries
from cacheformers.training.estimate import Work, estimate
from cacheformers.training.optim import Rates, make_optimizer

ROOT = Path(__file__).resolve().parents[1]
QUERIES, TOPK, TOKENS = 2048, 16, 1024
SEGMENT = 2048  # of a training step of 7B, as in recipes/llama2_7b_longpile.yaml
FACTOR = 2  # the device may err by so many times the CPU's error
LEAST = {"float32": 1e-6, "bfloat16": 1e-2}  # or this, if the CPU errs by less: what rounding adds up to
STEPS, PROBE = 4000, 20  # of SmolLM2: ten times the recipe's, and what its speed is measured on
Row = dict[str, Any]


def main() -> None:
    """Measure and write, part by part."""
    given = parser(__doc__, "")
    given.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in this order")
    given.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given.add_argument("--quick", action="store_true", help="toy sizes, to see whether it runs")
    given.add_argument("--rounds", type=int, default=15)
    given.add_argument("--minutes", type=float, default=9.5, help="for all of it (default: %(default)s)")
    given.add_argument("--smollm2", default="data/smollm2-135m-instruct", help="folder (default: %(default)s)")
    books = Path("../shared/data/books")
    given.add_argument("--books", type=Path, default=books, help="folder of train.jsonl.gz and valid.jsonl.gz")
    options = given.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here. --device cpu --quick runs the same code on toy sizes.")
    options.until = time.perf_counter() + 60 * options.minutes
    before = options.output / "gpu.json"
    kept = json.loads(before.read_text(encoding="utf-8")) if before.exists() else {}
    result: Row = {name: kept[name] for name in PARTS if name in kept and name not in options.parts}
    result |= {"failed": {}, "seconds": {}}
    for name in options.parts:
        begun = time.perf_counter()
        try:
            result[name] = PARTS[name](options)
        except Exception as error:
            traceback.print_exc()
            result["failed"][name] = f"{type(error).__name__}: {error}"
        result["seconds"][name] = time.perf_counter() - begun
        save("gpu", options, result, page, indent=None)
        gc.collect()
        torch.cuda.empty_cache()
    if result["failed"]:
        raise SystemExit(f"Failed: {', '.join(result['failed'])}")


def shape(options: argparse.Namespace) -> Shape:
    """Return the model whose time and memory are measured."""
    return Shape(small_config(), 1) if options.quick else shapes()["llama-2-7b"]


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )


def correct(options: argparse.Namespace) -> list[Row]:
    """Compare all methods on the device with the CPU."""
    return [row for name in METHODS for row in correct_method(name, options)]


def correct_method(name: str, options: argparse.Namespace) -> list[Row]:
    """Compare a method on the device with the CPU, in float32 and bfloat16, on a small random model with open gates."""
    torch.manual_seed(0)
    config = small_config()
    method = METHODS[name]
    settings: Any = {"segment_tokens": 64, **method.test_settings, "r": 4, "task_type": "CAUSAL_LM"}
    if hasattr(method.adapter_config, "cache_dtype"):
        settings["cache_dtype"] = "float32"  # by default a GPU keeps bfloat16
    rows = []
    for kind in LEAST:
        here: Any = get_peft_model(
            AutoModelForCausalLM.from_config(config, dtype=getattr(torch, kind)), method.adapter_config(**settings)
        )
        for parameter in here.parameters():
            if parameter.requires_grad and parameter.dim() < 2:
                parameter.data.normal_(0, 0.5)  # gates; they are closed at first
        there, precise = copy.deepcopy(here).to(options.device), copy.deepcopy(here).double()
        ids = torch.randint(3, 512, (2, 300))
        (exact, of_here, of_there) = (
            behavior(model, ids.to(device))
            for model, device in ((precise, "cpu"), (here, "cpu"), (there, options.device))
        )
        row: Row = {"method": name, "dtype": kind, "within": True, "tokens": bool((of_here[2] == of_there[2]).all())}
        for place, quantity in enumerate(("logits", "gradients")):
            own, found = (difference(one[place], exact[place]) for one in (of_here, of_there))
            row |= {quantity: found, f"{quantity}_of_cpu": own}
            row["within"] &= found <= FACTOR * max(own, LEAST[kind])
        print(", ".join(f"{key} {value:.1e}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
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
    return logits.double().cpu(), torch.cat([grad.flatten() for grad in trained]).double().cpu(), tokens.cpu()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def step(options: argparse.Namespace) -> list[Row]:
    """Measure training steps of LoRA alone and of a memory."""
    return [step_of(kind, options) for kind in ("lora", "neurocache")]


def step_of(kind: str, options: argparse.Namespace) -> Row:
    """Measure a training step with activation checkpointing, of LoRA alone or with a memory that is full."""
    base = shape(options)
    tokens, entries = (128, 1024) if options.quick else (SEGMENT, 16384)
    if kind == "lora":
        model: Any = lora_model(base, torch.bfloat16, options.device)
    else:
        model = memory_model(base, torch.bfloat16, options.device, segment_tokens=tokens, cache_size=entries)
    memory = None if kind == "lora" else full_memory(model.train())
    model.train()
    checkpoint_activations(model.base_model.model)
    model.base_model.model.disable_input_require_grads()
    optimizer = make_optimizer(model, Rates(1e-4, 1e-4, 1e-4), "adamw")
    ids, targets = torch.randint(0, base.config.vocab_size, (2, 1, tokens), device=options.device)

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
    told = estimate(base.config, model.active_peft_config, work).peak
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else held + extra
    found: Row = {"kind": kind, "tokens": tokens, "seconds": statistics.median(times)}
    found |= {"weights_bytes": held, "extra_bytes": extra, "peak_bytes": peak, "estimate_bytes": told}
    print(f"{kind}: {found['seconds']:.2f} s a step, peak {peak / 2**30:.2f} GiB, estimate {told / 2**30:.2f} GiB")
    return found


def measured_rates(options: argparse.Namespace) -> dict[str, float]:
    """Return the bytes per second of a copy, and the operations per second of a bfloat16 product."""
    size = 256 if options.quick else 8192
    a, b = (torch.randn(size, size, device=options.device).bfloat16() for _ in range(2))
    out, large = torch.empty_like(a), torch.empty(size, 8 * size, device=options.device)
    other = torch.empty_like(large)
    runs = {"copy": lambda: other.copy_(large), "product": lambda: torch.mm(a, b, out=out)}
    times = {name: statistics.median(taken) for name, taken in interleaved(runs, 9, options.device).items()}
    return {"copy": 2 * large.nbytes / times["copy"], "product": 2 * size**3 / times["product"]}


def search(options: argparse.Namespace) -> list[Row]:
    """Measure exact search of stores of several sizes."""
    rates = measured_rates(options)
    sizes = [(4096, 64)] if options.quick else [(131072, 256), (131072, 1024), (16384, 256)]
    return [search_of(count, width, rates, options) for count, width in sizes]


@torch.no_grad()
def search_of(count: int, width: int, rates: dict[str, float], options: argparse.Namespace) -> Row:
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
    row: Row = {"entries": count, "width": width, **ratio(times, "search", "product"), "times": times}
    row |= {"over": "torch.mm, bfloat16 output", "floor_seconds": least, "rates": rates}
    row |= {"extra_bytes": extra, "recall": found}
    print(
        f"search {QUERIES:,} x {count:,} x {width}: {shown(row)} of the product, {row['seconds'] / least:.1f} of the "
        f"floor, {extra / 2**20:.0f} MiB, recall {found:.4f}"
    )
    return row


def decode(options: argparse.Namespace) -> list[Row]:
    """Measure reading and new tokens with memories of several sizes."""
    return [decode_with(entries, options) for entries in ([2048] if options.quick else [16384, 131072])]


@torch.no_grad()
def decode_with(cache_size: int, options: argparse.Namespace) -> Row:
    """Measure a segment through a random base with a memory and with its adapter off; and a new token."""
    base_shape, tokens = shape(options), 256 if options.quick else TOKENS
    model: Any = memory_model(
        base_shape, torch.bfloat16, options.device, lora=False, segment_tokens=tokens, cache_size=cache_size
    )
    memory = full_memory(model)
    ids = torch.randint(0, base_shape.config.vocab_size, (1, tokens), device=options.device)

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
    row: Row = {"cache_size": cache_size, **ratio(times, "memory", "base"), "extra_bytes": extra, "times": times}
    row |= {"token_seconds": statistics.median(times["token"])}
    row |= {"base_token_seconds": statistics.median(times["base token"])}
    print(f"{cache_size:,} entries: {shown(row)} of the base, {1000 * row['token_seconds']:.1f} ms a token")
    return row


def smollm2(options: argparse.Namespace) -> list[Row]:
    """Train SmolLM2 on the books as long as there is time, and return its held-out perplexities."""
    train, valid = (options.books / f"{name}.jsonl.gz" for name in ("train", "valid"))
    if not (Path(options.smollm2).is_dir() and train.exists() and valid.exists()):
        raise FileNotFoundError(f"{options.smollm2} or {train} or {valid}: name them with --smollm2 and --books")
    given = [str(ROOT / "recipes/smollm2_books.yaml"), "--base", options.smollm2, "--overwrite", "--skip_base"]
    given += ["--train", str(train), "--valid", str(valid), "--cache_sizes", "0", "16384", "--device", options.device]
    given += ["--controls", "other_document", "--checkpoint_every", "0"]
    if options.quick:
        given += ["--segment_tokens", "64", "--start_segments", "40", "--retrieval_map", "2", "--dtype", "float32"]
        given += ["--valid_documents", "2", "--valid_tokens", "256"]
    probe, around = trained([*given, "--steps", "2" if options.quick else str(PROBE)], "runs/gpu_probe")
    left = options.until - time.perf_counter() - 1.2 * around
    fit = int(left / (probe["seconds"] / probe["steps"]))
    steps = 4 if options.quick else min(STEPS, fit)
    if steps < probe["steps"]:
        raise TimeoutError(f"{max(left, 0):.0f} s are left for training, which is {fit} steps: give more --minutes")
    result, around = trained([*given, "--steps", str(steps)], "runs/gpu_smollm2")
    same = {"steps": steps, "train_seconds": result["seconds"], "around_seconds": around, "tokens": result["tokens"]}
    return [{"memory": name, **same, **score} for name, score in result["scores"].items()]


def trained(given: list[str], output: str) -> tuple[Row, float]:
    """Run the recipe; return its result, and the seconds that it took beside the training."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "train_adapt.py"), *given, "--output", output], check=True)
    result: Row = json.loads(Path(output, "train_result.json").read_text(encoding="utf-8"))
    result["steps"] = len(result["losses"])
    return result, time.perf_counter() - begun - result["seconds"]


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "correct": correct,
    "search": search,
    "step": step,
    "decode": decode,
    "smollm2": smollm2,
}


def gibibytes(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / 2**30:.2f}"


def milliseconds(name: str) -> Callable[[Row], str]:
    return lambda row: f"{1000 * row[name]:.1f}"


# Title of a part, and the columns of its table.
TABLES: dict[str, tuple[str, dict[str, Callable[[Row], str]]]] = {
    "correct": (
        f"Errors against float64, at most {FACTOR} times the CPU's",
        {
            "method": lambda row: f"{row['method']}, {row['dtype']}",
            "logits": lambda row: f"{row['logits']:.1e}",
            "the CPU's": lambda row: f"{row['logits_of_cpu']:.1e}",
            "gradients": lambda row: f"{row['gradients']:.1e}",
            "the CPU's ": lambda row: f"{row['gradients_of_cpu']:.1e}",
            "within": lambda row: "yes" if row["within"] else "**no**",
            "same tokens": lambda row: "yes" if row["tokens"] else "no",
        },
    ),
    "search": (
        f"Exact search, {QUERIES:,} queries",
        {
            "entries": lambda row: f"{row['entries']:,} x {row['width']}",
            "ms": milliseconds("seconds"),
            "over torch.mm": shown,
            "over the floor": lambda row: f"{row['seconds'] / row['floor_seconds']:.1f}",
            "extra MiB": lambda row: f"{row['extra_bytes'] / 2**20:.0f}",
            "recall": lambda row: f"{row['recall']:.4f}",
        },
    ),
    "step": (
        "A training step",
        {
            "trained": lambda row: f"{row['kind']}, {row['tokens']:,} tokens",
            "seconds": lambda row: f"{row['seconds']:.2f}",
            "weights GiB": gibibytes("weights_bytes"),
            "peak GiB": gibibytes("peak_bytes"),
            "estimate GiB": gibibytes("estimate_bytes"),
        },
    ),
    "decode": (
        "Reading and decoding",
        {
            "entries": lambda row: f"{row['cache_size']:,}",
            "segment over the base": shown,
            "ms a token": milliseconds("token_seconds"),
            "base's ms a token": milliseconds("base_token_seconds"),
        },
    ),
    "smollm2": (
        "SmolLM2 on books",
        {
            "memory": lambda row: f"{row['memory']}, after {row['steps']:,} steps",
            "perplexity": lambda row: f"{row['perplexity']:.3f}",
            "95 %": lambda row: "{:.3f} - {:.3f}".format(*row["interval"]),
            "training s": lambda row: f"{row['train_seconds']:.0f}",
        },
    ),
}


def page(result: Row) -> str:
    """Return the Markdown page of the parts that are done."""
    model = "a small random model" if result["settings"]["quick"] == "True" else "random weights of Llama-2-7B's shape"
    taken = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
    text = f"Device: {result['about']['device']}. Steps and decoding: {model}, bfloat16. Took: {taken}."
    lines = opening("What a GPU says", result, text)
    for name, (title, columns) in TABLES.items():
        if name in result["failed"]:
            lines += [f"## {title}", "", f"Failed: {result['failed'][name]}", ""]
        elif name in result:
            rows = [[show(row) for show in columns.values()] for row in result[name]]
            lines += [f"## {title}", "", *table(list(columns), rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
