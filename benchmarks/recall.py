"""Train every memory from scratch on associative recall, and draw what it gives back, by pairs, distance and bytes.

    python benchmarks/recall.py                                        # all methods; minutes on two CPU cores
    python benchmarks/recall.py --methods window transformer_ls cache  # some, into the same files
    python benchmarks/recall.py --steps 8 --output /tmp/recall         # only to see it run

A text (recall_task.py) has pairs of a key and a value, and asks for some later. The same tiny Llama (2 layers of 64,
2 heads) learns with every method's memory in it, from random weights, with the same texts in the same order. A token
sees its own window of 32 tokens up to itself and the 32 before; `full` sees everything. Texts grow from 32 to 256
tokens (`--tokens`) in training, values have one token or three.

recall      pairs first, then all keys are asked (MQAR); a value is one token
retrieval   pairs among filler, one key is asked at the end; a value is three tokens, all of which must be right
far         half a text or more after the pair, where no window of two layers reaches

Beside every score: bytes held after a text of full length, and the time of reading it over the window's, in turns.
The published rule of CacheFormer (`cache_paper_block`, `alone_paper_block`) looks ahead, so its retrieval is also asked
as a decoder sees it, which has only the tokens so far.
Each method's result is in recall.json as soon as it is there; the same command again does what is missing. Results:
recall.json, recall.png, and tables on the screen. docs/results/recall.md says what they mean.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, Panel, Points, draw_lines, interleaved, parser, ratio, save, table
from recall_task import VOCABULARY, Layout, Texts, draw
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.modeling.architectures import attention_modules, find_decoder
from cacheformers.modeling.segments import new_memory
from cacheformers.training.optim import Rates, make_optimizer, make_schedule

SHORTEST, WINDOW = 32, 32
RATE, GATE_FACTOR, CLIP, WARMUP = 5e-3, 4.0, 1.0, 0.05
JOINS = 0.75  # share of the steps after which a branch joins that is off at first
GROWS = 0.35, 0.55  # shares of the steps between which texts grow, by doubling, to their full length
TOKENS_OF_A_STEP = 2048
BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "attention_bias": True,
}
EMBEDDING_STD, FIRST_LOOK = 0.5, 8.0

PAIRS, SOME = (4, 8, 16, 24, 32, 40), 16
BINS = (0, 32, 64, 96, 128, 192, 256)  # distances of recall in texts of 256 tokens; in longer ones, in proportion
TOPKS = (1, 2, 4, 7, 16)
COLORS = 64  # of the plot
DISTANCES = (16, 32, 64, 96, 128, 192, 240)  # of retrieval, likewise


@dataclass(frozen=True)
class Contestant:
    """A method and its settings, None for the base alone, which sees everything.

    Attributes:
        first: other settings until `JOINS` of the steps are done.
    """

    method: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)


def cacheformer(first: dict[str, Any] | None = None, **switches: Any) -> Contestant:
    """Return CacheFormer in the paper's shape (s 16, r_s 4, k 7). A forward takes a whole text, so gradients pass."""
    shape = {"window_tokens": WINDOW, "pool_tokens": 16, "pool_vectors": 4, "topk": 7, "segment_tokens": 1024}
    return Contestant("cacheformer_on_base", {**shape, "selection": "token", **switches}, first or {})


LATER = {"cache": False}  # the paper's advice: without the cache first
SLIDING = {"segment_tokens": WINDOW, "local_window": "sliding"}
CONTESTANTS = {
    "full": Contestant(None),
    "window": Contestant("windowed", SLIDING),
    "transformer_ls": cacheformer(overlap=False, cache=False),
    "transformer_ls_2": cacheformer(overlap=False, cache=False, pool_vectors=2),
    "cache_2": cacheformer(LATER, overlap=False, pool_vectors=2),
    "transformer_ls_1": cacheformer(overlap=False, cache=False, pool_vectors=1),
    "cache_1": cacheformer(LATER, overlap=False, pool_vectors=1),
    "overlap": cacheformer(cache=False),
    "cache": cacheformer(LATER, overlap=False),
    "overlap_cache": cacheformer(LATER),
    "cache_at_once": cacheformer(overlap=False),
    "cache_alone": cacheformer(overlap=False, long=False),
    "cache_previous_block": cacheformer(LATER, overlap=False, selection="previous_block"),
    "cache_paper_block": cacheformer(LATER, overlap=False, selection="paper_block"),
    "alone_paper_block": cacheformer(overlap=False, long=False, selection="paper_block"),
    "neurocache": Contestant("neurocache", {**SLIDING, "compression_factor": 1, "topk": 4, "gate": "none"}),
    "memorizing": Contestant("memorizing", {**SLIDING, "attention_layers": [1], "topk": 8}),
    "infini_linear": Contestant("infini_attention", {**SLIDING, "rule": "linear"}),
    "infini_delta": Contestant("infini_attention", {**SLIDING, "rule": "delta"}),
    "gated_deltanet": Contestant("gated_deltanet", SLIDING),
    "gated": Contestant("gated_attention", {"window_tokens": 2 * WINDOW, "gate_bias": 0.0, "segment_tokens": 1024}),
}


def main() -> None:
    """Train what is missing, score it, write."""
    given = parser(__doc__)
    given.set_defaults(output=RESULTS)
    given.add_argument("--methods", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="default: all")
    given.add_argument("--steps", type=int, default=500, help="of training, for every method (default: %(default)s)")
    given.add_argument(
        "--tokens", type=int, default=256, choices=[256, 512, 1024], help="of the longest texts (default: %(default)s)"
    )
    given.add_argument("--seed", type=int, default=0, help="of weights and texts (default: %(default)s)")
    given.add_argument("--texts", type=int, default=64, help="texts behind each score (default: %(default)s)")
    options = given.parse_args()
    options.output = options.output.resolve()

    try:
        earlier(options)
    except ValueError as error:
        given.error(str(error))
    for name in options.methods:
        if name in earlier(options):
            print(f"{name}: {options.output / 'recall.json'} has it.")
            continue
        contestant, start = CONTESTANTS[name], time.perf_counter()
        model = train(contestant, options.steps, options.seed, options.tokens)
        seconds = time.perf_counter() - start
        row = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training_seconds": round(seconds),
            **scores(model, options.texts, options.tokens),
            "retrieval_by_topk": by_topk(model, contestant, options.texts, options.tokens, 3),
            "token_by_topk": by_topk(model, contestant, options.texts, options.tokens, 1),
            **as_decoder(model, contestant, options.texts, options.tokens),
            **costs(model, options.seed, options.tokens),
        }
        print(f"{name}: {seconds:.0f} s of training, {short(row)}", flush=True)
        write(options, {**earlier(options), name: row})  # another process may have added rows
    write(options, earlier(options))
    print("\n".join(tables(earlier(options), options.tokens)))


def earlier(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows that are there; raise ValueError if they were made in another way."""
    path = options.output / "recall.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in ("steps", "seed", "texts", "tokens"):
        there = found["settings"].get(name, "256")  # older files had texts of one length
        if there != str(getattr(options, name)):
            raise ValueError(
                f"{path} was made with --{name} {there}: give the same, another --output, or delete the file."
            )
    now = {name: [contestant.settings, contestant.first] for name, contestant in CONTESTANTS.items()}
    changed = [name for name, row in found["rows"].items() if [row["settings"], row["first"]] != now[name]]
    if changed:
        raise ValueError(f"{path} has {changed[0]} with other settings than this script: delete the file, or that row.")
    rows: dict[str, Any] = found["rows"]
    return rows


def write(options: argparse.Namespace, rows: dict[str, Any]) -> None:
    """Write the rows so far, in the order of `CONTESTANTS`, and their plot."""
    ordered = {
        name: {**rows[name], "settings": contestant.settings, "first": contestant.first}
        for name, contestant in CONTESTANTS.items()
        if name in rows
    }
    draw_rows(save("recall", options, {"rows": ordered}, indent=None), ordered, options.tokens)


def make_model(contestant: Contestant, seed: int) -> PreTrainedModel:
    """Make a model with random weights; the base's are the same for every method.

    One head of the first layer begins with biases that make it look at the token before, as short convolutions do for
    the models of Arora et al. Embeddings are larger than Llama's, so that a token stands out from what that head
    brings: with all weights of one size, full attention had learned nothing after 1,600 steps.
    """
    torch.manual_seed(seed)
    base: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**BASE))
    start_base(base)
    if contestant.method is None:
        return base
    config = AutoConfig.for_model(contestant.method, text_config=BASE, **contestant.settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    find_decoder(model).load_state_dict(find_decoder(base).state_dict(), strict=False)
    model.lm_head.load_state_dict(base.lm_head.state_dict())
    return model


@torch.no_grad()
def start_base(base: Any) -> None:
    """Enlarge the embeddings, and set the biases of one head: its score is highest one token back.

    Half of the channels, paired as rotary positions pair them, turn fast enough to tell neighbors apart.
    """
    nn.init.normal_(base.get_input_embeddings().weight, std=EMBEDDING_STD)
    attention: Any = attention_modules(find_decoder(base))[0]
    pairs = base.config.hidden_size // base.config.num_attention_heads // 2
    angles = base.model.rotary_emb.inv_freq[: pairs // 2]
    attention.k_proj.bias[: pairs // 2] = FIRST_LOOK
    attention.q_proj.bias[: pairs // 2] = FIRST_LOOK * angles.cos()
    attention.q_proj.bias[pairs : pairs + pairs // 2] = -FIRST_LOOK * angles.sin()


def scaled(distances: Sequence[int], longest: int) -> list[int]:
    """Return distances in texts of `longest` tokens, from those in texts of 256."""
    return [distance * longest // 256 for distance in distances]


def text_tokens(step: int, steps: int, longest: int) -> int:
    """Return how many tokens the texts of a training step have."""
    doublings = int(math.log2(longest // SHORTEST))
    begin, end = (share * steps for share in GROWS)
    for done in range(doublings):
        if step < begin + done * (end - begin) / (doublings - 1):
            return SHORTEST * 2**done
    return longest


def layout_of(step: int, steps: int, longest: int, random: torch.Generator) -> Layout:
    """Return the layout of a training step: even steps have values of one token, odd ones of three."""
    tokens = text_tokens(step, steps, longest)
    value_tokens = 1 + 2 * (step % 2)
    most = min(Layout(tokens, 1, value_tokens).cells // 2, 32)
    fewest = max(most // (2 if tokens == SHORTEST else 8), 1)
    pairs = int(torch.randint(fewest, most + 1, (1,), generator=random))
    return Layout(tokens, pairs, value_tokens, "mixed" if step % 2 else "first")


def train(contestant: Contestant, steps: int, seed: int, longest: int) -> PreTrainedModel:
    """Train all weights of a new model on texts of up to `longest` tokens, and return it."""
    random = torch.Generator().manual_seed(seed)
    model = make_model(replace(contestant, settings={**contestant.settings, **contestant.first}), seed).train()
    rates = Rates(RATE, RATE, GATE_FACTOR * RATE, beta=GATE_FACTOR * RATE)
    optimizer = make_optimizer(model, rates)
    schedule = make_schedule(optimizer, steps, int(WARMUP * steps))
    for step in range(steps):
        if contestant.first and step == int(JOINS * steps):
            model = changed_to(contestant, model).train()
            held, optimizer = optimizer.state_dict(), make_optimizer(model, rates)
            optimizer.load_state_dict(held)
            schedule = make_schedule(optimizer, steps, int(WARMUP * steps), done=step)
        layout = layout_of(step, steps, longest, random)
        texts = draw(layout, TOKENS_OF_A_STEP // layout.tokens, random)
        losses = token_losses(model(input_ids=texts.ids, use_cache=False).logits, texts.labels)
        loss = losses.sum() / (texts.labels != IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if (step + 1) % max(steps // 6, 1) == 0:
            print(f"  step {step + 1}: loss {loss.item():.3f}, {layout.tokens} tokens", flush=True)
    return model


def changed_to(contestant: Contestant, model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with other settings and the same weights."""
    other = make_model(contestant, 0)
    other.load_state_dict(model.state_dict())
    return other


def by_topk(
    model: PreTrainedModel, contestant: Contestant, texts: int, longest: int, value_tokens: int, decoded: bool = False
) -> dict[str, float]:
    """Return shares of right answers in retrieval with other numbers of segments than in training.

    Retrieval, because the pairs of recall stand in the first few segments, so a choice may ignore who asks. Each token
    of a value needs a hit of its own, so values of one token show the choice best. Empty without CacheFormer's cache.
    """
    if "pool_tokens" not in contestant.settings or not contestant.settings.get("cache", True):
        return {}
    found = {}
    for topk in TOPKS:
        other = replace(contestant, settings={**contestant.settings, "topk": topk})
        layout = Layout(longest, SOME, value_tokens, "one", scaled(DISTANCES, longest)[-2])
        found[str(topk)] = share(answers(changed_to(other, model), layout, 4 * texts, decoded)[0])
    return found


def as_decoder(model: PreTrainedModel, contestant: Contestant, texts: int, longest: int) -> dict[str, dict[str, float]]:
    """Return the shares of `by_topk` where each token is predicted from those before it; empty if they are the same."""
    if contestant.settings.get("selection") != "paper_block":
        return {}
    shares = [by_topk(model, contestant, texts, longest, value_tokens, decoded=True) for value_tokens in (3, 1)]
    return dict(zip(("retrieval_by_topk_decoded", "token_by_topk_decoded"), shares, strict=True))


def scores(model: PreTrainedModel, texts: int, longest: int) -> dict[str, dict[str, float]]:
    """Return shares of right answers, by number of pairs and by distance."""
    found: dict[str, dict[str, float]] = {
        name: {} for name in ("recall_far", "recall_by_distance", "retrieval_far", "retrieval_by_distance")
    }
    bins, distances = scaled(BINS, longest), scaled(DISTANCES, longest)
    for pairs in PAIRS:
        right, distance = answers(model, Layout(longest, pairs), texts)
        found["recall_far"][str(pairs)] = share(right[distance >= longest // 2])
        if pairs == SOME:
            for low, high in zip(bins, bins[1:], strict=False):
                found["recall_by_distance"][f"{low}-{high}"] = share(right[(distance >= low) & (distance < high)])
        retrieved, _ = answers(model, Layout(longest, pairs, 3, "one", distances[-2]), texts)
        found["retrieval_far"][str(pairs)] = share(retrieved)
    for distance_ in distances:
        retrieved, _ = answers(model, Layout(longest, SOME, 3, "one", distance_), texts)
        found["retrieval_by_distance"][str(distance_)] = share(retrieved)
    return found


@torch.no_grad()
def answers(model: PreTrainedModel, layout: Layout, texts: int, decoded: bool = False) -> tuple[Tensor, Tensor]:
    """Return which queries of new texts are answered right, and how far their pairs are, both `[texts, queries]`.

    Args:
        decoded: predict each token of a value from the tokens before it alone.
    """
    drawn = draw(layout, texts, torch.Generator().manual_seed(2**31 + layout.pairs))
    return drawn.right(predictions(model.eval(), drawn, decoded)), drawn.query_at - drawn.pair_at


def predictions(model: PreTrainedModel, drawn: Texts, decoded: bool) -> Tensor:
    """Return the likeliest tokens where a value is asked for, `[texts, tokens]`; elsewhere anything."""
    if not decoded:
        found: Tensor = model(input_ids=drawn.ids, use_cache=False).logits.argmax(-1)
        return found
    found = torch.full_like(drawn.labels, IGNORED)
    for last in (drawn.labels != IGNORED).any(0).nonzero()[:, 0].tolist():
        logits = model(input_ids=drawn.ids[:, : last + 1], use_cache=False, logits_to_keep=1).logits
        found[:, last] = logits[:, -1].argmax(-1)
    return found


def share(right: Tensor) -> float:
    return round(float(right.float().mean()), 3)


@torch.no_grad()
def costs(model: PreTrainedModel, seed: int, longest: int) -> dict[str, float]:
    """Return bytes held after a text of `longest` tokens, and the time of reading it, beside the window's."""
    window = make_model(CONTESTANTS["window"], seed).eval()
    ids = draw(Layout(longest, SOME), 1, torch.Generator().manual_seed(seed)).ids
    runs = {"window": lambda: read(window, ids), "own": lambda: read(model.eval(), ids)}
    times = interleaved(runs, 9)
    found = ratio(times, "own", "window")
    return {
        "state_bytes": state_bytes(read(model, ids)),
        "seconds_per_token": float(f"{found['seconds'] / longest:.3g}"),
        "time_over_window": round(found["ratio"], 2),
    }


def read(model: PreTrainedModel, ids: Tensor) -> Any:
    """Read a text into a new memory, or cache of the base, and return that."""
    held = DynamicCache(config=model.config) if model.config.model_type == "llama" else new_memory(model, len(ids))
    model(input_ids=ids, past_key_values=held, use_cache=True, logits_to_keep=1)
    return held


def state_bytes(held: Any) -> int:
    """Return the bytes of a memory or of a cache of transformers."""
    if isinstance(held, DynamicCache):
        layers: Any = held.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    size: int = held.nbytes
    return size


def short(row: dict[str, Any]) -> str:
    far, far_retrieval = row["recall_far"][str(SOME)], row["retrieval_far"][str(SOME)]
    return f"far recall {far:.0%}, retrieval {far_retrieval:.0%}, {row['state_bytes']:,} bytes"


def tables(rows: dict[str, Any], longest: int) -> list[str]:
    """Return the tables of the page."""
    beside = {
        name: [
            f"{row['state_bytes'] / 1024:.0f}" if row["state_bytes"] else "-",
            f"{1e6 * row['seconds_per_token']:.0f}",
            f"{row['time_over_window']:.2f}",
        ]
        for name, row in rows.items()
    }
    lines = []
    for key, title in (
        ("recall_far", f"recall, {longest // 2} tokens or more after the pair, by pairs"),
        ("recall_by_distance", f"recall, {SOME} pairs, by distance"),
        ("retrieval_far", f"retrieval, {scaled(DISTANCES, longest)[-2]} tokens after the pair, by pairs"),
        ("retrieval_by_distance", f"retrieval, {SOME} pairs, by distance"),
    ):
        columns = list(next(iter(rows.values()))[key])
        cells = [[name, *(cell(row[key][column]) for column in columns), *beside[name]] for name, row in rows.items()]
        lines += table([title, *columns, "KiB held", "µs a token", "/ window"], cells)
    return lines


def cell(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f}"


def draw_rows(path: Path, rows: dict[str, Any], longest: int) -> None:
    """Draw accuracy by pairs, distance and bytes, of all but the published rule, which looks ahead."""
    from PIL import Image

    rows = {name: row for name, row in rows.items() if row["settings"].get("selection") != "paper_block"}

    def lines(key: str) -> dict[str, Points]:
        return {name: [(middle(at), 100 * value) for at, value in row[key].items()] for name, row in rows.items()}

    held: dict[str, Points] = {
        name: [(row["state_bytes"] / 1024, 100 * row["recall_far"][str(SOME)])] for name, row in rows.items()
    }
    far = f"{longest // 2} tokens or more back"
    panels = [
        [
            Panel(f"recall, {far}", "pairs", "right, %", lines("recall_far")),
            Panel(f"recall of {SOME} pairs", "tokens since the pair", "right, %", lines("recall_by_distance")),
        ],
        [
            Panel(f"retrieval, {SOME} pairs", "tokens since the pair", "right, %", lines("retrieval_by_distance")),
            Panel(f"recall of {SOME} pairs, {far}", "KiB held", "right, %", held),
        ],
    ]
    draw_lines(path, panels, log=False)
    with Image.open(path) as drawn:
        few = drawn.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE)  # a third of the bytes
    few.save(path, optimize=True)


def middle(at: str) -> float:
    """Return the number of a column: a count, or the middle of a range."""
    ends = [int(end) for end in at.split("-")]
    return sum(ends) / len(ends)


if __name__ == "__main__":
    main()
