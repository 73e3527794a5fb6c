"""Draw learned gates: which heads use Infini-attention's memory, and which words of a text look far.

    cacheformers gates runs/infini_attention --output runs/gates
    cacheformers gates runs/gated_attention --text book.txt --output runs/gates

Infini-attention: sigmoid(beta) of every layer and head (the paper's figure 3), and how they moved where the folder has
the log of its training. Gated attention: the mean gate of each layer over texts, how many gates are in each tenth from
0 to 1, and the texts as pages in which every token has the color of its gate; with --fix-heads the means decide once
and for all which heads see everything (as in DuoAttention), and --save writes that model.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from cacheformers.adapters.folders import check_base_folder, new_base, new_folder, own_tokenizer
from cacheformers.common.files import write_json
from cacheformers.common.plots import COLORS, GRAY, beside, heat_map, new_figure, save_figures
from cacheformers.evaluation.text_perplexity import raw_text
from cacheformers.methods.gated_attention.gated_attention import fix_heads
from cacheformers.methods.gated_attention.options import GatedAttentionOptions
from cacheformers.methods.infini_attention import InfiniAttentionOptions
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.method import active_memories, active_options
from cacheformers.modeling.segments import new_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ReadText:
    """A text and the gates of its tokens.

    Attributes:
        pieces: the text of each token.
        gates: of every layer with gates, sigmoid of the logits, `[channels, tokens]`.
        counted: which tokens have something beyond the window, `[tokens]`; the other gates decide nothing.
    """

    name: str
    pieces: list[str]
    gates: dict[int, Tensor]
    counted: Tensor


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cacheformers gates", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="Folder or Hub id of an adapter, or of a model with a memory of its own.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for pictures, and their numbers as JSON.")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="Text files (gated attention needs one).")
    tokens = "Read the first N tokens of each text. Default: as many as the base model has positions."
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens)
    fix = "Heads whose mean gate is at least this see everything for good, the others their window."
    parser.add_argument("--fix-heads", type=float, metavar="LEAST", help=fix)
    parser.add_argument("--save", type=Path, help="With --fix-heads: a new folder for the model with fixed heads.")
    given = parser.parse_args(arguments)
    try:
        run(given)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def run(given: argparse.Namespace) -> None:
    """Load the model, read the texts, write what was found; raise OSError or ValueError if something is wrong."""
    if (given.fix_heads is None) != (given.save is None):
        raise ValueError("--fix-heads and --save go together: give the least mean gate and the folder to write.")
    model = load(given.model)
    options: Any = active_options(find_decoder(unwrap(model)))
    if isinstance(options, InfiniAttentionOptions):
        if given.text or given.save:
            raise ValueError("Infini-attention's shares are the same for every text: leave --text and --fix-heads out.")
        draw_shares(given, model, options)
    elif isinstance(options, GatedAttentionOptions):
        draw_gates(given, model, options)
    else:
        method = "no memory" if options is None else f"the memory {options.signature['method']}"
        raise ValueError(f"{given.model} has {method}: this command is for infini_attention and gated_attention.")
    print(f"Written to {given.output}")


def load(name: str) -> nn.Module:
    """Load an adapter on its base, or a model."""
    try:
        config = PeftConfig.from_pretrained(name)
    except ValueError:  # no adapter
        return AutoModelForCausalLM.from_pretrained(name).eval()
    base = config.base_model_name_or_path or ""
    if not base:
        raise ValueError(f"The adapter {name} does not name its base model: {new_base()}.")
    check_base_folder(base, name, option="")
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), name).eval()


# Infini-attention


@torch.no_grad()
def draw_shares(given: argparse.Namespace, model: nn.Module, options: InfiniAttentionOptions) -> None:
    """Write shares.json and shares.png, and shares_history.png where training left its log."""
    memories: list[Any] = active_memories(find_decoder(unwrap(model)))
    found = torch.stack([memory.active_parts.beta.shares() for memory in memories])  # [layers, heads]
    print(f"Share of the memory: mean {found.mean():.3f}, {found.min():.3f} to {found.max():.3f}")
    result = {"model": given.model, "layers": list(options.layers), "shares": found.tolist()}
    write_json(given.output / "shares.json", result)
    figures = {given.output / "shares.png": lambda: share_map(options.layers, found)}
    training = Path(given.model) / "train_result.json"
    if training.is_file():
        log = [entry for entry in json.loads(training.read_text(encoding="utf-8"))["log"] if "share_histogram" in entry]
        figures[given.output / "shares_history.png"] = lambda: share_history(log)
    save_figures(figures)


# Gated attention


def draw_gates(given: argparse.Namespace, model: nn.Module, options: GatedAttentionOptions) -> None:
    """Write gates.json, gates.png and a page for each text, and with --save a model with fixed heads."""
    if all(options.fixed(layer) is not None for layer in options.layers):
        raise ValueError("All heads of this model are fixed already, so its gates are not used.")
    if not given.text:
        raise ValueError("Gates depend on the text: give --text FILE.")
    if given.save is not None and given.save.exists():
        raise ValueError(f"{given.save} exists already: choose another folder to write.")
    most = options.base.max_positions
    if given.tokens is not None and given.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {given.tokens}.")
    if given.tokens is not None and options.positions > most and given.tokens > most:
        raise ValueError(f"--tokens must be at most {most}, the base model's positions, got {given.tokens}.")
    tokenizer = own_tokenizer(given.model)
    texts = [read_text(model, options, tokenizer, path, given.tokens or most) for path in given.text]
    counted = {layer: torch.cat([text.gates[layer][:, text.counted] for text in texts], 1) for layer in texts[0].gates}
    means = {layer: gates.double().mean(1) for layer, gates in counted.items()}  # [channels]
    every = torch.cat([gates.flatten() for gates in counted.values()])
    threshold = options.threshold or 0.5
    closed = float((every < threshold).double().mean())
    histogram = torch.histc(every.float(), 10, 0.0, 1.0).int().tolist()
    for layer, mean in means.items():
        print(f"layer {layer}: mean gate {', '.join(f'{value:.3f}' for value in mean.tolist())}")
    print(f"{closed:.1%} of the gates are below {threshold:g}.")
    result = {
        "model": given.model,
        "window_tokens": options.window_tokens,
        "gate_per": options.gate_per,
        "means": {layer: mean.tolist() for layer, mean in means.items()},
        "threshold": threshold,
        "below_threshold": closed,
        "histogram": histogram,
        "texts": [as_dict(text) for text in texts],
    }
    if given.save is not None:
        far_heads = {**dict(options.far_heads), **dict(fix_heads(options, means, given.fix_heads).far_heads)}
        result["far_heads"] = far_heads
        config: Any = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else model.config
        config.far_heads = {layer: list(heads) for layer, heads in far_heads.items()}
        with new_folder(given.save) as draft:
            model.save_pretrained(str(draft))  # type: ignore[operator]  # a transformers model
            tokenizer.save_pretrained(draft)
        heads = sum(map(len, far_heads.values()))
        print(f"{heads} of {len(far_heads) * options.base.kv_heads} kv heads see everything: {given.save}")
    write_json(given.output / "gates.json", result)
    save_figures({given.output / "gates.png": lambda: by_layer(means, options.gate_per, histogram)})
    for number, text in enumerate(texts):
        values = torch.stack([layer.mean(0) for layer in text.gates.values()]).mean(0)  # of layers and heads
        file = given.output / f"text_{number}.html"
        file.write_text(page(text.name, text.pieces, values.tolist(), text.counted.tolist()), encoding="utf-8")


@torch.no_grad()
def read_text(
    model: nn.Module, options: GatedAttentionOptions, tokenizer: PreTrainedTokenizerBase, path: Path, tokens: int
) -> ReadText:
    """Read the beginning of a text file and return the gates of its tokens.

    Raises:
        OSError, ValueError: the file cannot be read, or all of it is within the window.
    """
    if not tokenizer.is_fast:
        raise ValueError("This takes a fast tokenizer, which says where in the text a token ends.")
    text = raw_text(path)
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = torch.tensor(encoded.input_ids[:tokens])
    if len(ids) <= options.window_tokens:
        raise ValueError(
            f"Of {path} {len(ids)} tokens are read, all within the window of {options.window_tokens}, so "
            "no gate decides anything. Give a longer text."
        )
    ends = [*(start for start, _ in encoded.offset_mapping[1:]), len(text)][: len(ids)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    memory = new_memory(model, 1)
    state: Any = memory.state
    found, device = [], next(model.parameters()).device
    for segment in ids[None].to(device).split(options.segment_tokens, 1):
        model(input_ids=segment, past_key_values=memory, logits_to_keep=1)
        found.append(state.last)
    gates = {layer: torch.cat([part.gates[layer][0] for part in found], 1).cpu() for layer in found[0].gates}
    return ReadText(path.name, pieces, gates, torch.cat([part.counted[0] for part in found]).cpu())


def as_dict(text: ReadText) -> dict[str, Any]:
    """Return the tokens and the gate of each in every layer (the mean of its heads), for JSON."""
    return {
        "name": text.name,
        "pieces": text.pieces,
        "counted": text.counted.tolist(),
        "gates": {layer: [round(gate, 4) for gate in gates.mean(0).tolist()] for layer, gates in text.gates.items()},
    }


PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ max-width: 50em; margin: 2em auto; font: 16px/1.6 serif; }}
main {{ white-space: pre-wrap; }}
.near {{ color: #999999; }}
</style>
<h1>{title}</h1>
<p>Color: <span style="background: {none}">0, the window is enough</span> to
<span style="background: {full}">1, looks at everything before</span>; the mean of layers and heads, which each token
shows when pointed at. <span class="near">Gray</span> tokens have nothing beyond the window.</p>
<main>{tokens}</main>
</html>
"""


def share_map(layers: Sequence[int], shares: Tensor) -> Figure:
    """Draw the memory's share in every head, `[layers, heads]`, the top layer above."""
    count, heads = shares.shape
    return heat_map(
        {"Share of the memory, sigmoid(beta)": shares.cpu().numpy()},
        ("head", "layer"),
        "0: local attention, 1: memory",
        (max(5, 0.4 * heads + 3), max(3, 0.35 * count + 1.5)),
        [str(layer) for layer in layers],
        [str(head) for head in range(heads)],
        vmin=0,
        vmax=1,
        origin="lower",
    )[0]


def share_history(log: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw heads' shares during training: mean and range by step, and the number of heads in each tenth.

    Args:
        log: entries with `step`, `share_mean`, `share_min`, `share_max` and `share_histogram`.
    """
    figure, (above, below) = new_figure("Share of the memory in training", ["sigmoid(beta)", "heads"], sharex=False)
    steps = [entry["step"] for entry in log]
    lowest, highest = ([entry[f"share_{name}"] for entry in log] for name in ("min", "max"))
    above.fill_between(steps, lowest, highest, color=COLORS[5], alpha=0.5, label="all heads")
    above.plot(steps, [entry["share_mean"] for entry in log], color=COLORS[0], label="mean")
    above.set(xlabel="step", ylim=(0, 1))
    above.legend(frameon=False)
    histograms_beside(below, {f"step {entry['step']}": entry["share_histogram"] for entry in (log[0], log[-1])})
    return figure


def histograms_beside(axes: Axes, counts: Mapping[str, Sequence[int]]) -> None:
    """Draw bars for the tenths from 0 to 1, those of several histograms beside each other."""
    width = 0.8 / len(counts)  # of a bar, in tenths
    for number, (name, bars) in enumerate(counts.items()):
        places = [(tenth + 0.5 + beside(number, len(counts), 0.8 - width)) / len(bars) for tenth in range(len(bars))]
        axes.bar(places, bars, width=width / len(bars), color=COLORS[number % 8], label=name)
    axes.set(xlabel="0: window or local attention, 1: everything or memory", xlim=(0, 1))
    axes.legend(frameon=False)


def by_layer(means: Mapping[int, Tensor], gate_per: str, histogram: Sequence[int]) -> Figure:
    """Draw each layer's mean gate `[channels]` as a bar, each head's as a dot, and a histogram in tenths."""
    figure, (axes, below) = new_figure("Gates", ["mean by layer", "gates of tokens"], sharex=False)
    for place, mean in enumerate(means.values()):
        axes.bar(place, float(mean.mean()), color=COLORS[5])
        if len(mean) > 1:
            places = [place + beside(number, len(mean), 0.6) for number in range(len(mean))]
            axes.plot(places, mean.tolist(), linestyle="", marker="o", markersize=4, color=COLORS[0])
    axes.axhline(0.5, color=GRAY, linewidth=0.8)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(len(means)), [str(layer) for layer in means])
    axes.set_xlabel("layer" if gate_per == "layer" else f"layer (dots: one a {gate_per.replace('_', ' ')})")
    histograms_beside(below, {"all layers": histogram})
    return figure


def page(title: str, pieces: Sequence[str], gates: Sequence[float], counted: Sequence[bool]) -> str:
    """Write a text as HTML, each token on the color of its gate; `counted` says which have something far to see."""
    tokens = [
        f'<span style="background: {color(gate)}" title="{gate:.3f}">{html.escape(piece)}</span>'
        if far
        else f'<span class="near">{html.escape(piece)}</span>'
        for piece, gate, far in zip(pieces, gates, counted, strict=True)
    ]
    return PAGE.format(title=html.escape(title), none=color(0.0), full=color(1.0), tokens="".join(tokens))


def color(gate: float) -> str:
    """Return white for 0, orange for 1."""
    return f"rgba(230, 159, 0, {gate:.3f})"
