"""Which segments a CacheFormer retrieves for each token of a text: a table, a heat map, and a file.

    cacheformers segments MODEL TEXT --output runs/segments

The table is that of the paper (Table 5) for one layer and head; the picture (its Figure 4) shows every layer.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers.common.files import write_json
from cacheformers.common.plots import heat_map, save_figures
from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions
from cacheformers.methods.cacheformer.modeling import CacheFormerForCausalLM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Block = tuple[tuple[int, int], list[int]]  # first and last row, and their segments


@torch.no_grad()
def retrieved(model: CacheFormerForCausalLM, ids: Tensor) -> list[Tensor]:
    """Return what every layer retrieves while the model reads a document `[1, time]`, teacher-forced.

    Returns:
        By layer: segments `[kv_heads, time, topk * neighbors]`; -1 for none.

    Raises:
        ValueError: the model retrieves nothing.
    """
    if not model.model.options.cache:
        raise ValueError("This model retrieves no segments: its configuration has cache=False.")
    found: list[Tensor] = []

    def watch(attention: nn.Module, args: Any) -> None:
        hidden, rotation = args[:2]
        found.append(attention.selected_segments(hidden, rotation)[0].cpu())  # type: ignore[operator]  # CacheFormer has it

    handles = [layer.self_attn.register_forward_pre_hook(watch) for layer in model.model.layers]
    try:
        model.model(ids)
    finally:
        for handle in handles:
            handle.remove()
    return found


def blocks(options: CacheFormerOptions, lists: Tensor) -> list[Block]:
    """Group consecutive rows of `[time, topk * neighbors]` that are in one block and retrieve the same."""
    changes = set(((lists[1:] != lists[:-1]).any(1).nonzero()[:, 0] + 1).tolist())
    if options.selection != "token":
        changes |= set(range(options.block_rows, len(lists), options.block_rows))
    starts = [0, *sorted(changes)]
    ends = [*starts[1:], len(lists)]
    return [((start, end - 1), lists[start].tolist()) for start, end in zip(starts, ends, strict=True)]


def table(options: CacheFormerOptions, lists: Tensor) -> str:
    """Format rows, what they retrieve, and the last segment that they may retrieve, from `[time, topk * neighbors]`."""
    lines = [f"{'rows':>13}  {'last allowed':>12}  segments"]
    for (start, end), chosen in blocks(options, lists):
        allowed = int(options.admissible(options.block_start(torch.tensor(end))))
        last = str(allowed - 1) if allowed else "none"
        lines.append(f"{f'{start}-{end}':>13}  {last:>12}  {chosen}")
    return "\n".join(lines)


def shares(lists: Tensor, segments: int) -> Tensor:
    """Return the share of heads that retrieve each segment, `[time, segments]`, from `[kv_heads, time, k*u]`."""
    hits = torch.zeros(*lists.shape[:2], segments + 1)
    hits.scatter_(2, torch.where(lists < 0, segments, lists), 1.0)
    return hits[..., :segments].mean(0)


def draw(options: CacheFormerOptions, layers: list[Tensor]) -> Figure:
    """Draw a panel a layer: which segments (across) each token (down) retrieves, and how many heads agree.

    The line is where a token is: what is right of it has not been read.
    """
    time, wide = layers[0].shape[1], min(len(layers), 4)
    segments = -(-time // options.pool_tokens)
    figure, panels = heat_map(
        {f"layer {number}": shares(lists, segments).numpy() for number, lists in enumerate(layers)},
        (f"segment ({options.pool_tokens} tokens)", "token"),
        "share of key-value heads that retrieve it",
        (1.5 + 2.6 * wide, 1 + 2.6 * -(-len(layers) // wide)),
        extent=(0, segments, time, 0),
        cmap="magma_r",
        interpolation="none",
        vmin=0,
        vmax=1,
    )
    for axes in panels:
        axes.plot([0, time / options.pool_tokens], [0, time], color="#56B4E9", linewidth=0.8)
    return figure


def token_ids(model: str, vocabulary: int, text: str) -> Tensor:
    """Encode a text `[1, time]` with the model's tokenizer; without one as bytes, if the vocabulary has 256 tokens."""
    if Path(model).is_dir() and not (Path(model) / "tokenizer_config.json").exists():
        if vocabulary != 256:
            raise ValueError(f"{model} has no tokenizer, and its {vocabulary} tokens are not bytes: save one there.")
        return torch.tensor([list(text.encode())])
    ids: Tensor = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids
    return ids


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cacheformers segments", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="Folder or Hub id of a CacheFormer model.")
    parser.add_argument("text", type=Path, help="A text file.")
    parser.add_argument("--tokens", type=int, default=1024, help="Read its first N tokens. Default: 1024.")
    parser.add_argument("--layer", type=int, default=0, help="Layer of the table. Default: 0.")
    parser.add_argument("--head", type=int, default=0, help="Key-value head of the table. Default: 0.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for segments.json and segments.png.")
    given = parser.parse_args(arguments)
    try:
        run(given)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def run(given: argparse.Namespace) -> None:
    """Read the text, print the table, write the files."""
    model = AutoModelForCausalLM.from_pretrained(given.model).eval()
    if not isinstance(model, CacheFormerForCausalLM):
        raise ValueError(
            f"{given.model} is a {model.config.model_type} model, not a cacheformer one. (What is on a pretrained "
            "model is not drawn.)"
        )
    options = model.model.options
    for name, value, count in (("layer", given.layer, len(model.model.layers)), ("head", given.head, options.kv_heads)):
        if not 0 <= value < count:
            raise ValueError(f"--{name} must be from 0 to {count - 1}, got {value}.")
    ids = token_ids(given.model, model.config.vocab_size, given.text.read_text(encoding="utf-8"))
    ids = ids[:, : max(given.tokens, 0)]
    if not ids.numel():
        raise ValueError(f"There is nothing to read: {given.text} is empty, or --tokens is not positive.")
    layers = retrieved(model, ids)
    print(f"Layer {given.layer}, head {given.head}, {ids.shape[1]:,} tokens:")
    print(table(options, layers[given.layer][given.head]))

    result = {
        "model": given.model,
        "text": given.text.name,
        "tokens": ids.shape[1],
        "options": asdict(options),
        "layers": [
            [[{"rows": rows, "segments": chosen} for rows, chosen in blocks(options, head)] for head in lists]
            for lists in layers
        ],
    }
    write_json(given.output / "segments.json", result)
    save_figures({given.output / "segments.png": lambda: draw(options, layers)})
    print(f"Written to {given.output}")
