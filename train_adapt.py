"""Adapt a pretrained model to read with a memory: train an adapter on long documents.

    python train_adapt.py recipes/smollm2_books.yaml
    python train_adapt.py recipes/smollm2_books.yaml --method lora --output runs/books_lora --steps 50
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import datasets
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import cacheformers
from cacheformers.modeling.attach import architecture, base_shape
from cacheformers.training.documents import Documents, load_texts
from cacheformers.training.evaluate import HeldOut, Score, evaluate, held_out
from cacheformers.training.lanes import Lanes
from cacheformers.training.loss import mean_loss
from cacheformers.training.optim import Rates, clip_gradients, make_optimizer, trained_parameters
from cacheformers.training.options import RecipeParser, layer_map, method_options, option

# New adapters are not trained with the published package's errors.
MemoryOptions: Any = method_options(cacheformers.NeurocacheAdapterConfig, without=("compatibility",))


@dataclass
class TrainOptions:
    """What is trained, on what, and how."""

    base: str = option(help="Pretrained causal language model: a local folder or a Hub id.")
    train: list[str] = option(
        help="Documents to train on: files or folders. JSON lines (.jsonl, .jsonl.gz) with a field 'text', one "
        "document a line; .txt and .md, one document a file."
    )
    output: str = option(help="Folder for the adapter, its tokenizer and train_result.json.")
    overwrite: bool = option(False, help="Write into an output folder that already holds an adapter.")
    method: Literal["neurocache", "lora"] = option(
        "neurocache",
        help="'neurocache' trains a memory and LoRA. 'lora' leaves the memory out: the same LoRA on the same segments "
        "in the same order, to compare with.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", help="Precision of the base model's weights ('auto': as saved). The adapter is trained in float32."
    )
    device: str | None = option(None, help="Where to train, such as cpu or cuda:0. Default: a GPU if there is one.")
    seed: int = option(0, help="Fixes the adapter's random start and the order of documents.")

    min_tokens: int = option(2, help="Leave out documents with fewer tokens (the paper: 20000).")
    lanes: int = option(1, help="Documents read side by side: rows of a batch. Each lane keeps a memory of its own.")
    steps: int = option(1000, help="Optimiser steps; each reads one segment of segment_tokens in every lane.")

    lora_targets: list[str] | None = option(
        None,
        help="Linear layers that LoRA adapts, by name, in the layers with cache attention. Default: those of the "
        "feed-forward block. 'none': no LoRA.",
    )
    lora_rate: float = option(3e-4, help="Peak learning rate of LoRA.")
    memory_rate: float = option(3e-4, help="Peak learning rate of the memory's projections.")
    gate_factor: float = option(
        30.0, help="The gates' peak rate is memory_rate times this: from zero they have far to go."
    )
    weight_decay: float = option(0.0, help="AdamW's weight decay of matrices; gates and norms have none.")
    warmup: float = option(0.1, help="Share of the steps in which rates rise; then they fall on a cosine to zero.")
    clip: float = option(1.0, help="Gradients are scaled down to this norm.")
    activation_checkpointing: bool = option(
        False, help="Compute activations twice instead of keeping them: less memory, about a third more time."
    )

    valid: list[str] | None = option(None, help="Held-out documents, in the forms of --train. Default: no evaluation.")
    valid_documents: int | None = option(None, help="Evaluate on the first so many documents. Default: on all.")
    valid_tokens: int | None = option(None, help="Evaluate on the first so many tokens of each. Default: on all.")
    skip_base: bool = option(False, help="Do not evaluate the base model before training.")


def main(arguments: list[str] | None = None) -> None:
    """Train as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options: TrainOptions
    options, memory_options = parser.parse(arguments)
    segment = memory_options.segment_tokens

    # What can be wrong is looked at before a model is loaded.
    try:
        check_options(options)
        tokenizer = AutoTokenizer.from_pretrained(options.base)
        documents = Documents(load_texts(options.train), tokenizer, options.min_tokens)
        documents.check(segment)
        valid = valid_set(options, tokenizer)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    torch.manual_seed(options.seed)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    base = AutoModelForCausalLM.from_pretrained(options.base, dtype=options.dtype)
    base.to(device)  # type: ignore[arg-type]
    try:
        check_vocabulary(base, tokenizer)
        model: PeftModel = get_peft_model(base, adapter_config(base.config, options, memory_options))
    except ValueError as error:
        parser.error(str(error))
    if options.activation_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    trained = sum(parameter.numel() for parameter in trained_parameters(model))
    print(
        f"{options.method} on {options.base}: {trained:,} parameters to train, {len(documents)} documents, "
        f"{options.lanes} lanes of {segment} tokens, {options.steps} steps"
    )

    scores: dict[str, Score] = {}
    if valid and not options.skip_base:
        with model.disable_adapter():
            scores["base"] = evaluate(model, valid, segment, title="Base model")

    lanes = Lanes(documents, options.lanes, segment, options.seed)
    losses, seconds = train(model, lanes, options)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)

    if valid and options.method == "lora":
        scores["lora"] = evaluate(model, valid, segment, title="LoRA")
    elif valid:
        for size in (0, memory_options.cache_size):
            name = f"cache {size:,}" if size else "cache off"
            scores[name] = evaluate(model, valid, segment, size, title=name)

    result = {
        "command": ["train_adapt.py", *arguments],
        "options": asdict(options),
        "memory_options": asdict(memory_options),
        "environment": environment(device),
        "trained_parameters": trained,
        "losses": losses,
        "seconds_per_step": seconds,
        "scores": {name: score.as_dict() for name, score in scores.items()},
    }
    path = Path(options.output) / "train_result.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_table(losses, seconds, scores)
    print(f"Adapter and train_result.json are in {options.output}")


def make_parser() -> RecipeParser:
    return RecipeParser([TrainOptions, MemoryOptions], (__doc__ or "").splitlines()[0])


def train(model: PeftModel, lanes: Lanes, options: TrainOptions) -> tuple[list[float], float]:
    """The training loop. Returns the loss of each step and the mean seconds a step."""
    rates = Rates(
        options.lora_rate, options.memory_rate, options.memory_rate * options.gate_factor, options.weight_decay
    )
    optimizer, schedule = make_optimizer(model, rates, options.steps, int(options.warmup * options.steps))
    device = next(model.parameters()).device
    model.train()
    memory = None if options.method == "lora" else cacheformers.new_memory(model, options.lanes)
    losses: list[float] = []
    tokens = 0
    with tqdm(range(1, options.steps + 1), desc="Training", unit=" steps") as bar:
        for number in bar:
            step = lanes.step()
            padded = not bool(step.attention_mask.all())
            if memory is not None:
                memory.reset(step.reset.nonzero()[:, 0].tolist())
            output = model(
                input_ids=step.input_ids.to(device),
                attention_mask=step.attention_mask.to(device) if padded else None,
                past_key_values=memory,
                use_cache=memory is not None,
            )
            memory = output.past_key_values
            loss = mean_loss(output.logits, step.labels.to(device))
            if not bool(torch.isfinite(loss)):
                raise FloatingPointError(
                    f"The loss of step {number} is {loss.item()} (documents {step.documents}); nothing was saved. Try "
                    "lower learning rates or, instead of float16, bfloat16."
                )
            loss.backward()
            clip_gradients(model, options.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)

            losses.append(float(loss.detach()))
            tokens += int(step.attention_mask.sum())
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"loss {mean(losses[-20:]):.3f}, {tokens / elapsed:,.0f} tokens/s")
    return losses, elapsed / options.steps


def check_options(options: TrainOptions) -> None:
    """Raise ValueError for numbers that make no sense and for an output folder that is taken."""
    for name in ("lanes", "steps", "valid_documents", "valid_tokens", "clip"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be greater than 0, got {value}.")
    if (Path(options.output) / "adapter_config.json").exists() and not options.overwrite:
        raise ValueError(f"{options.output} already holds an adapter: choose another --output, or add --overwrite.")


def check_vocabulary(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError where the tokenizer has ids that the model does not know."""
    known = base.config.vocab_size
    if len(tokenizer) > known:
        raise ValueError(f"The tokenizer has {len(tokenizer)} entries, the model {known}: they do not belong together.")


def valid_set(options: TrainOptions, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """The held-out documents; none if no evaluation is wanted."""
    if options.valid is None:
        return []
    documents = Documents(load_texts(options.valid), tokenizer, options.min_tokens)
    return held_out(documents, options.valid_documents, options.valid_tokens)


def adapter_config(base: PretrainedConfig, options: TrainOptions, memory_options: Any) -> LoraConfig:
    """The adapter of the chosen method; LoRA alone has the targets that it has beside the memory."""
    chosen = asdict(memory_options)
    if chosen["retrieval_map"] is not None:
        chosen["retrieval_map"] = layer_map(chosen["retrieval_map"])
    targets = options.lora_targets or list(architecture(base).feed_forward)
    config = cacheformers.NeurocacheAdapterConfig(
        **chosen, target_modules=[] if targets == ["none"] else targets, task_type="CAUSAL_LM"
    )
    layers = list(config.resolve(base_shape(base)).attention_layers)
    if options.method == "lora":
        if targets == ["none"]:
            raise ValueError("--method lora with --lora_targets none leaves nothing to train.")
        return LoraConfig(
            r=config.r,
            lora_alpha=config.lora_alpha,
            target_modules=targets,
            layers_to_transform=layers,
            task_type="CAUSAL_LM",
        )
    config.layers_to_transform = None if targets == ["none"] else layers
    return config


def environment(device: str) -> dict[str, Any]:
    """When, where and with what a result came about."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (cacheformers, torch, transformers, peft, datasets)},
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


def git_commit(folder: Path) -> str | None:
    """The commit of a working tree, marked if files differ from it; None for an installed package."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def print_table(losses: list[float], seconds: float, scores: dict[str, Score]) -> None:
    print(f"\n{len(losses)} steps, {seconds:.2f} s a step; mean loss of the last 20: {mean(losses[-20:]):.4f}")
    if scores:
        print(f"\n{'held-out documents':<20}{'perplexity':>12}{'bits/character':>16}{'tokens':>12}")
    for name, score in scores.items():
        print(f"{name:<20}{score.perplexity:>12.3f}{score.bits_per_character:>16.4f}{score.tokens:>12,}")


if __name__ == "__main__":
    main()
