"""What CacheFormer's attention costs beside full causal attention: 12 heads of 64, window 128, one row.

    python benchmarks/attention_cacheformer.py                    # lengths to 64K, float32
    python benchmarks/attention_cacheformer.py --device cuda      # bfloat16 beside flash attention, in minutes
    python benchmarks/attention_cacheformer.py --quick            # to see that it works

Attention alone, of rotated queries and keys: norms, pooling and the choice of segments are in it, projections are not;
keys are values, but on a pretrained layer. Runs that are compared take turns in one process; a ratio is of two runs of
the same round. A decoding step is the mean of a window of steps, so that what happens once a window or block has its
share. On a GPU its results are compared with the CPU's first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Panel, Points, draw_lines, interleaved, opening, parser, peak_extra, ratio, save, shown, table
from torch import Tensor

from cacheformers.modeling.memories.cacheformer import CacheFormerOptions, CacheFormerParts, Projected, make_parts
from cacheformers.modeling.memories.cacheformer_attention import attend
from cacheformers.modeling.memories.cacheformer_state import CacheFormerState

HEADS, WIDTH, WINDOW = 12, 64, 128
MANY_TOKENS = 32768  # more take minutes a run
PIECE = 4096  # tokens that a decoding state is filled with at a time
PAPER = CacheFormerOptions(HEADS, HEADS, WIDTH, WINDOW, overlap=False)  # s 16, r_s 4, k 7
OVERLAP = replace(PAPER, overlap=True)
CONSTANT = replace(PAPER, pool_tokens=WINDOW, pool_vectors=1, topk=2)
PRETRAINED = replace(PAPER, pretrained=True, tied=False, local_norm=False, global_norm=False)
SHAPES = {"s 128, r 1, k 2": CONSTANT, "s 16, r 4, k 7": PAPER, "s 16, r 4, k 7, overlap": OVERLAP}
BRANCHES = {
    "short": replace(PAPER, long=False, cache=False),
    "short, long (Transformer-LS)": replace(PAPER, cache=False),
    "short, long, overlap": replace(OVERLAP, cache=False),
    "short, long, cache": PAPER,
    "short, long, cache by prefix": replace(PAPER, selection="prefix"),
    "short, long, cache by token": replace(PAPER, selection="token"),
    "short, long, overlap, cache": OVERLAP,
}
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Setting:
    """Where, in what precision and how often everything is measured."""

    rounds: int
    device: str
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def times(self, runs: dict[str, Callable[[], None]]) -> Times:
        """Return the seconds of each run, round after round."""
        return interleaved(runs, self.rounds, self.device)

    def make(self, options: CacheFormerOptions) -> CacheFormerParts:
        """Make what a layer trains."""
        modules = {name: module.to(self.device) for name, module in make_parts(options).items()}
        return CacheFormerParts(**modules)  # type: ignore[arg-type]


def main() -> None:
    """Measure, print, write."""
    given = parser(__doc__)
    given.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768, 65536])
    given.add_argument("--training_lengths", type=int, nargs="+", default=[4096, 16384], help="forward and backward")
    given.add_argument("--decode", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens read before a step")
    given.add_argument("--at", type=int, default=16384, help="length of the branches' prices and of peak memory")
    given.add_argument("--rounds", type=int, default=5, help="of each measurement; one of texts above 32K tokens")
    given.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="a GPU measures in bfloat16")
    given.add_argument("--quick", action="store_true", help="short texts, a round")
    options = given.parse_args()
    if options.quick:
        options.lengths, options.training_lengths, options.decode = [512, 1024, 2048], [1024], [512, 2048]
        options.at, options.rounds = 1024, 1
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here; --device cpu measures on the processor.")
    torch.manual_seed(0)
    setting = Setting(options.rounds, options.device, torch.float32 if options.device == "cpu" else torch.bfloat16)
    result: dict[str, Any] = {
        "dtype": str(setting.dtype).removeprefix("torch."),
        "agreement": {name: agreement(shape, setting) for name, shape in SHAPES.items()},
        # First: what longer texts leave in the allocator would count.
        "memory": [row for training in (False, True) for row in memory(options.at, setting, training)],
        "forward": [row for tokens in options.lengths for row in beside_sdpa(tokens, setting)],
        "training": [row for n in options.training_lengths for row in beside_sdpa(n, setting, training=True)],
        "growth": growth(options.at // 2, setting),
        "branches": branches(options.at, setting),
        "decode": decode(options.decode, setting),
    }
    name = "attention_cacheformer" if options.device == "cpu" else "attention_cacheformer_gpu"
    draw(save(name, options, result, page), result["forward"])


# What is measured


def columns(options: CacheFormerOptions, tokens: int) -> float:
    """Return how many columns a token sees on average in a text of `tokens`; full attention has tokens / 2."""
    compressed = (options.long + options.overlap) * tokens * options.pool_vectors / (2 * options.pool_tokens)
    return 1.5 * options.window_tokens + compressed + options.cache * options.retrieved * options.pool_tokens


@torch.no_grad()
def agreement(options: CacheFormerOptions, setting: Setting) -> float | None:
    """Return the largest difference from the CPU's float32 result; None on the CPU itself."""
    if setting.device == "cpu":
        return None
    given, read = Projected(*torch.randn(2, 1, HEADS, 2048, WIDTH)), []
    for where in (Setting(1, "cpu", torch.float32), setting):
        torch.manual_seed(0)  # the same parts
        there = given.each(lambda tensor, where=where: tensor.to(where.device))  # type: ignore[misc]
        read.append(attend(options, where.make(options), there).cpu())
    return float((read[1] - read[0]).abs().max())


def attention(
    options: CacheFormerOptions | None, tokens: int, setting: Setting, training: bool = False
) -> Callable[[], None]:
    """Return a run of CacheFormer's attention (None: full causal attention) over a text, with gradients in training."""
    q, k, v, gradient = (setting.random(1, HEADS, tokens, WIDTH) for _ in range(4))
    leaves = [tensor.requires_grad_(training) for tensor in (q, k, v)]
    parts = CacheFormerParts() if options is None else setting.make(options)

    def run() -> None:
        with torch.set_grad_enabled(training):
            if options is None:
                output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                output = attend(options, parts, Projected(q, k, None if options.tied else v))
        if training:
            output.backward(gradient)
            for leaf in leaves:
                leaf.grad = None

    return run


def beside_sdpa(tokens: int, setting: Setting, training: bool = False) -> list[dict[str, Any]]:
    """Measure each shape's time over that of full attention, and over the share of columns that it sees."""
    if tokens > MANY_TOKENS:
        setting = replace(setting, rounds=1)
    runs = {"sdpa": attention(None, tokens, setting, training)}
    runs |= {name: attention(options, tokens, setting, training) for name, options in SHAPES.items()}
    times = setting.times(runs)
    rows = []
    for name, options in SHAPES.items():
        model = columns(options, tokens) / (tokens / 2)
        found = ratio(times, name, "sdpa")
        rows.append({"shape": name, "tokens": tokens, "model": model, "of_model": found["ratio"] / model, **found})
        rows[-1]["sdpa_seconds"] = statistics.median(times["sdpa"])
        print(f"{tokens:,} tokens{', with gradients' if training else ''}, {name}: {shown(found)} of SDPA", flush=True)
    return rows


def growth(tokens: int, setting: Setting) -> dict[str, Any]:
    """Measure the time of twice the tokens over that of `tokens`, where reads hardly grow."""
    runs = {"once": attention(CONSTANT, tokens, setting), "twice": attention(CONSTANT, 2 * tokens, setting)}
    return {"tokens": tokens, **ratio(setting.times(runs), "twice", "once")}


def memory(tokens: int, setting: Setting, training: bool) -> list[dict[str, Any]]:
    """Measure peak bytes over those of full attention: beyond the inputs, and with them."""
    shapes = {**SHAPES, "the same on a pretrained layer": PRETRAINED}
    peaks, inputs = {}, {}
    for name, options in {"sdpa": None, **shapes}.items():
        run = attention(options, tokens, setting, training)
        run()
        peaks[name] = max(peak_extra(run, setting.device), 1)
        given = 2 if options is not None and options.tied else 3  # queries, keys, values; in training the gradient too
        inputs[name] = (given + training) * tokens * HEADS * WIDTH * setting.dtype.itemsize
    whole = {name: peaks[name] + inputs[name] for name in peaks}
    return [
        {"shape": name, "training": training, "bytes": peaks[name], "ratio": peaks[name] / peaks["sdpa"]}
        | {"bytes_with_inputs": whole[name], "ratio_with_inputs": whole[name] / whole["sdpa"]}
        for name in shapes
    ]


def branches(tokens: int, setting: Setting) -> list[dict[str, Any]]:
    """Measure each set of branches over the window alone, forward and with gradients."""
    found: dict[str, Times] = {}
    for kind in ("forward", "training"):
        runs = {name: attention(options, tokens, setting, kind == "training") for name, options in BRANCHES.items()}
        found[kind] = setting.times(runs)
    return [
        {"branches": name, **{kind: ratio(times, name, "short") for kind, times in found.items()}} for name in BRANCHES
    ]


@torch.no_grad()
def decode(lengths: list[int], setting: Setting) -> list[dict[str, Any]]:
    """Measure the time of a new token by the tokens read before, and the bytes of keys that it reads."""
    runs = {f"{name}|{read}": steps(options, read, setting) for name, options in SHAPES.items() for read in lengths}
    runs |= {f"sdpa|{read}": full_step(read, setting) for read in lengths}
    times = setting.times(runs)
    rows = []
    for name in (*SHAPES, "sdpa"):
        for read in lengths:
            found = ratio(times, f"{name}|{read}", f"{name}|{lengths[0]}")
            found["seconds"] /= WINDOW
            rows.append(
                {
                    "shape": name,
                    "read": read,
                    "bytes": bytes_read(SHAPES.get(name), read, setting.dtype.itemsize),
                    **found,
                }
            )
    return rows


def bytes_read(options: CacheFormerOptions | None, read: int, number: int) -> float:
    """Return the bytes of keys (and of values that are not the keys) that a step reads after `read` tokens."""
    if options is None:
        return 2.0 * read * HEADS * WIDTH * number
    return (2 * columns(options, read) - columns(options, 0)) * HEADS * WIDTH * number  # compressed: all, not half


def steps(options: CacheFormerOptions, read: int, setting: Setting) -> Callable[[], None]:
    """Return a run of a window of new tokens, one by one, after a text of `read` tokens."""
    state, parts = CacheFormerState(options, 1, setting.dtype, setting.device), setting.make(options)
    for start in range(0, read, PIECE):
        state.attend(parts, Projected(*setting.random(2, 1, HEADS, min(PIECE, read - start), WIDTH)))
    new = Projected(*setting.random(2, 1, HEADS, 1, WIDTH))

    @torch.no_grad()
    def run() -> None:
        for _ in range(WINDOW):
            state.attend(parts, new)

    return run


def full_step(read: int, setting: Setting) -> Callable[[], None]:
    """Return the same run with full attention."""
    q, k, v = setting.random(1, HEADS, 1, WIDTH), *setting.random(2, 1, HEADS, read, WIDTH)

    def run() -> None:
        for _ in range(WINDOW):
            F.scaled_dot_product_attention(q, k, v)

    return run


# What is shown


def page(result: dict[str, Any]) -> str:
    """Format every number as tables."""
    chosen = result["settings"]
    text = (
        f"12 heads x 64, window 128, one row, {result['dtype']}; medians of {chosen['rounds']} rounds (one above 32K "
        "tokens), the middle half in brackets. SDPA is torch's causal attention."
    )
    lines = opening("CacheFormer's attention beside full attention", result, text)
    for name, found in result["agreement"].items():
        lines += [f"Largest difference from the CPU, {name}: {found}.", ""] if found else []
    for kind, title in (("forward", "Forward"), ("training", "Forward and backward")):
        titles = ["shape", "tokens", "of SDPA", "columns / (n/2)", "measured / columns", "seconds", "SDPA's"]
        rows = [
            [row["shape"], f"{row['tokens']:,}", shown(row), f"{row['model']:.3f}", f"{row['of_model']:.2f}"]
            + [f"{row['seconds']:.3f}", f"{row['sdpa_seconds']:.3f}"]
            for row in result[kind]
        ]
        lines += [f"## {title}", "", *table(titles, rows)]
    grown = result["growth"]
    twice = f"{grown['tokens']:,} to {2 * grown['tokens']:,} tokens, s 128, r 1, k 2: {shown(grown)} times the time."
    lines += ["## Twice the text", "", twice, "", f"## Peak memory, {chosen['at']} tokens", ""]
    rows = [
        [row["shape"], "forward and backward" if row["training"] else "forward", f"{row['bytes'] / 2**20:.0f}"]
        + [f"{row['ratio']:.2f}", f"{row['ratio_with_inputs']:.2f}"]
        for row in result["memory"]
    ]
    lines += table(["shape", "", "MiB beyond the inputs", "of SDPA's", "with the inputs"], rows)
    lines += [f"## The price of each branch, {chosen['at']} tokens", ""]
    rows = [[row["branches"], shown(row["forward"]), shown(row["training"])] for row in result["branches"]]
    lines += table(["branches (s 16, r 4, k 7)", "forward, of the window alone", "and backward"], rows)
    rows = [
        [row["shape"], f"{row['read']:,}", f"{1000 * row['seconds']:.3f}", f"{row['bytes'] / 2**20:.2f}", shown(row)]
        for row in result["decode"]
    ]
    titles = ["shape", "tokens read", "ms a token", "MiB read", "of the first length"]
    return "\n".join([*lines, "## Decoding", "", *table(titles, rows)])


def draw(path: Path, forward: list[dict[str, Any]]) -> None:
    """Draw the time of a forward by length, of each shape and of full attention."""
    lines: dict[str, Points] = {
        name: [(row["tokens"], row["seconds"]) for row in forward if row["shape"] == name] for name in SHAPES
    }
    first = [row for row in forward if row["shape"] == next(iter(SHAPES))]
    lines["full attention (SDPA)"] = [(row["tokens"], row["sdpa_seconds"]) for row in first]
    draw_lines(path, [[Panel("CacheFormer's attention, 12 heads x 64", "tokens", "seconds, forward", lines)]])


if __name__ == "__main__":
    main()
