"""Which attention heads of a base find the passages that answer questions: a table, a heat map, and a file.

    python recipes/make_facts.py data/facts --documents 1 \\
        --plays data/plays/valid/hamlet.md data/plays/valid/the-tempest.md
    cacheformers heads --base data/smollm2-135m-instruct --data data/facts/records

Every key-value head ranks the passages of each text by its attention alone (methods/retrieval_heads.py), and the place
of the passage that answers says how good it is. A few questions are enough: good heads stand out. BM25, which counts
words in common, is beside them. The best heads go into `attach`, and are a memory without any training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from peft import get_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase

from cacheformers.common.base_model import ModelOptions
from cacheformers.common.environment import environment
from cacheformers.common.files import write_json
from cacheformers.common.plots import heat_map, save_figures
from cacheformers.common.recipe import RecipeParser, option
from cacheformers.evaluation.loading import load, prepare, progress
from cacheformers.evaluation.longbench.records import Record, load_records, own_tasks
from cacheformers.evaluation.longbench.retrieval import BM25, asking, chunks, found_in, token_spans
from cacheformers.methods.retrieval_heads import RetrievalHeadsAdapterConfig, passage_scores
from cacheformers.modeling.architectures import base_shape
from cacheformers.modeling.reading import read
from cacheformers.modeling.recall import asked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH = 0.9  # of a passage that answers, in a chunk that counts as found
SHOWN = 10
RECIPE = "recipes/attach/retrieval_heads.yaml"


@dataclass
class HeadsOptions:
    """Questions, and how texts are read; ValueError for a wrong number."""

    _argument_group_name = "questions"
    data: str = option(
        help="A folder with TASK.jsonl, .jsonl.gz or .parquet: LongBench's records with `gold`, pairs of start and end "
        "of the passages that answer, in characters of the context. recipes/make_facts.py makes some."
    )
    output: str = option("runs/which_heads", help="Folder for result.json and heads.png.")
    tasks: list[str] | None = option(None, help="Tasks by name. Default: all in a folder without LongBench's own.")
    limit: int = option(20, help="Only the first N records of each task that have a question and a passage.")
    chunk_words: int = option(100, help="Words (Chinese: characters) of a passage.")
    best: int = option(2, help="How many of the best heads are named for `attach`.")
    segment_tokens: int = option(256, help="Tokens that are read at once.")
    window_tokens: int = option(252, help="Tokens before a segment that it sees, beside the first 4 of the text.")

    def __post_init__(self) -> None:
        given = asdict(self)
        for name in ("limit", "chunk_words", "best", "segment_tokens", "window_tokens"):
            if given[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {given[name]}.")


def main(arguments: list[str] | None = None) -> None:
    """Rank the heads of a base as the options say."""
    parser = RecipeParser([ModelOptions, HeadsOptions], (__doc__ or "").splitlines()[0])
    given = sys.argv[1:] if arguments is None else arguments
    model, options = parser.parse(given)
    try:
        run(model, options, given)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def run(model: ModelOptions, options: HeadsOptions, arguments: Sequence[str]) -> None:
    """Read the texts, ask the questions, and write down what came out. Processes share the questions."""
    state, config, tokenizer, _ = prepare(model, None)
    if not tokenizer.is_fast:
        raise ValueError(f"Passages are found with a fast tokenizer, which {model.base} does not have.")
    shape, records = base_shape(config), chosen_records(options)
    if options.best > shape.layers * shape.kv_heads:
        raise ValueError(f"best {options.best}: this base has {shape.layers * shape.kv_heads} key-value heads.")
    reader = RetrievalHeadsAdapterConfig(
        heads={layer: list(range(shape.kv_heads)) for layer in range(shape.layers)},
        local_window="sliding" if shape.rotary else "segment",
        segment_tokens=options.segment_tokens,
        window_tokens=options.window_tokens,
        sink_tokens=4,
        target_modules=[],
    )
    reader.resolve(shape)
    base: Any = load(model, None, state.device)
    heads: Any = get_peft_model(base, reader).eval()
    own: list[tuple[int, dict[tuple[int, int], int], int]] = []
    mine = list(enumerate(records))[state.process_index :: state.num_processes]
    with progress("Asking", len(mine), " questions") as bar:
        for number, record in mine:
            own.append((number, *record_ranks(heads, tokenizer, record, options.chunk_words)))
            bar.update(1)
    found = sorted(gather_object(own), key=lambda each: each[0])
    if not state.is_main_process:
        return
    words = [by_words for _, _, by_words in found]
    ranks = {head: [by_head[head] for _, by_head, _ in found] for head in found[0][1]}
    order = sorted(ranks, key=lambda head: (-quality(ranks[head]), head))
    print(table(order, ranks, words))
    output = Path(options.output)
    result = {
        "command": ["cacheformers", "heads", *arguments],
        "options": {**asdict(model), **asdict(options)},
        "records": [record.id for record in records],
        "bm25": words,
        "heads": [{"layer": layer, "head": head, "ranks": ranks[layer, head]} for layer, head in order],
        "environment": environment(state.device, state.num_processes, model.base),
    }
    write_json(output / "result.json", result, indent=1)
    save_figures({output / "heads.png": lambda: draw(ranks)})
    print(f"Every rank is in {output}\n")
    print(f"The {options.best} best, as a memory:\n  {attach_command(model.base, options, order, shape.rotary)}")


def attach_command(base: str, options: HeadsOptions, order: Sequence[tuple[int, int]], rotary: bool) -> str:
    """Return the command that makes a memory of the best heads, which reads as they were measured."""
    best = sorted(order[: options.best])
    named = " ".join(f"{layer}:{','.join(str(own) for at, own in best if at == layer)}" for layer in dict(best))
    more = "" if rotary else " --local_window segment"
    for name in ("segment_tokens", "window_tokens") if rotary else ("segment_tokens",):
        own = getattr(options, name)
        more += "" if own == getattr(HeadsOptions, name) else f" --{name} {own}"
    return f"cacheformers attach {RECIPE} --base {base} --heads {named}{more} --output runs/heads"


def chosen_records(options: HeadsOptions) -> list[Record]:
    """Return the records that have a question and a passage; raise ValueError if there are none."""
    records = []
    if not Path(options.data).is_dir():
        raise ValueError(f"--data {options.data} is no folder: it holds a file TASK.jsonl for each task.")
    for task in options.tasks or own_tasks(options.data):
        usable = [record for record in load_records(options.data, task) if record.gold and record.input.strip()]
        records += usable[: options.limit]
    if not records:
        raise ValueError(
            f"No record in {options.data} has a question (`input`) and the place of its answer (`gold`): "
            "recipes/make_facts.py makes some."
        )
    return records


@torch.no_grad()
def record_ranks(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, record: Record, chunk_words: int
) -> tuple[dict[tuple[int, int], int], int]:
    """Return how each head ranks the best passage that answers, from 1, and how BM25 does."""
    text = tokenizer(record.context, return_offsets_mapping=True, verbose=False)
    ends, texts = [end for _, end in text.offset_mapping], chunks(record.context, chunk_words)
    places = found_in(record.context, texts)
    spans = token_spans(places, ends)
    answers = [max(overlap(place, gold) for gold in record.gold) for place in places]
    right = np.array(answers) >= min(ENOUGH, max(answers))
    memory = read(model, [text.input_ids], progress=False)
    before, query = asking(tokenizer, record.input.strip())
    state: Any = asked(model, memory, [*before, *query], skip=len(before)).state
    shares = state.shares(len(before) + len(query), len(text.input_ids))
    found = {head: rank(passage_scores(own, len(before), spans).numpy(), right) for head, own in shares.items()}
    return found, rank(np.asarray(BM25().scores(record.input, texts)), right)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Return which share of the shorter of two ranges is in both."""
    common = min(one[1], other[1]) - max(one[0], other[0])
    return max(common, 0) / max(min(one[1] - one[0], other[1] - other[0]), 1)


def rank(scores: NDArray[Any], right: NDArray[np.bool_]) -> int:
    """Return the place of the best right passage, from 1; after all that score as much."""
    return int((scores[~right] >= scores[right].max()).sum()) + 1


def quality(ranks: Sequence[int]) -> float:
    """Return the mean reciprocal rank."""
    return float(np.mean(1 / np.array(ranks)))


def table(order: Sequence[tuple[int, int]], ranks: dict[tuple[int, int], list[int]], words: Sequence[int]) -> str:
    """Format the best heads and BM25."""
    rows = [(f"layer {layer}, head {head}", ranks[layer, head]) for layer, head in order[:SHOWN]]
    lines = [f"{'':<20}{'reciprocal rank':>16}{'first':>8}{'first six':>11}"]
    for name, own in (*rows, ("BM25", words)):
        first, six = (float(np.mean(np.array(own) <= count)) for count in (1, 6))
        lines.append(f"{name:<20}{quality(own):>16.2f}{first:>8.0%}{six:>11.0%}")
    return "\n".join(lines)


def draw(ranks: dict[tuple[int, int], list[int]]) -> Figure:
    """Draw the mean reciprocal rank of every key-value head."""
    layers, heads = (max(side) + 1 for side in zip(*ranks, strict=True))
    numbers = np.array([[quality(ranks[layer, head]) for layer in range(layers)] for head in range(heads)])
    figure, _ = heat_map(
        {"passages that answer, by the attention of one head": numbers},
        ("layer", "key-value head"),
        "mean reciprocal rank",
        (9, 1.6 + 0.3 * heads),
        [str(head) for head in range(heads)],
        vmin=0,
        vmax=1,
    )
    return figure
