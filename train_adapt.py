"""Adapt a pretrained model to read with a memory: train an adapter on long documents.

python train_adapt.py recipes/smollm2_books.yaml
python train_adapt.py recipes/smollm2_books.yaml --method lora --output runs/books_lora --steps 50
torchrun --nproc_per_node 8 train_adapt.py recipes/mistral_7b_longpile.yaml --resume
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedTokenizerBase

import cacheformers
from cacheformers.evaluation.adapter import check_controls, evaluate_adapter
from cacheformers.evaluation.model_card import model_card
from cacheformers.evaluation.options import EvalOptions
from cacheformers.evaluation.perplexity import HeldOut, held_out
from cacheformers.evaluation.plots import save_plots
from cacheformers.evaluation.run import scores
from cacheformers.evaluation.tables import print_runs
from cacheformers.modeling.memories.neurocache_options import NeurocacheOptions
from cacheformers.training.adapter import adapter_config, start_memory
from cacheformers.training.base_model import (
    ModelOptions,
    base_config,
    base_folder,
    base_identity,
    check_attention,
    check_quantization,
    load_base,
    load_tokenizer,
)
from cacheformers.training.checkpoints import CheckpointError, Checkpoints, write_text
from cacheformers.training.documents import DataOptions, DocumentRow, Documents, open_documents
from cacheformers.training.environment import environment
from cacheformers.training.estimate import Estimate, estimate
from cacheformers.training.gguf_base import is_gguf
from cacheformers.training.groups import make_groups
from cacheformers.training.history import History
from cacheformers.training.loop import ProcessLost, Stopped, TrainingRun, train
from cacheformers.training.optim import Rates, make_optimizer, make_schedule, trained_parameters
from cacheformers.training.options import RecipeParser, method_options
from cacheformers.training.processes import check_division, check_processes, make_accelerator, prepare, uses_deepspeed
from cacheformers.training.publishing import HubOptions, check_hub, publish
from cacheformers.training.run_state import inner, save_adapter, trained_state
from cacheformers.training.settings import (
    RunOptions,
    TrainOptions,
    check_output,
    check_resumable,
    check_train_options,
    resumed_settings,
)

# New adapters are not trained with the published package's errors.
MemoryOptions: Any = method_options(cacheformers.NeurocacheAdapterConfig, without=("compatibility",))


@dataclass
class Options:
    """A recipe: its options by topic."""

    model: ModelOptions
    data: DataOptions
    train: TrainOptions
    run: RunOptions
    evaluation: EvalOptions
    hub: HubOptions
    memory: Any  # MemoryOptions


@dataclass
class Plan:
    """A checked recipe: everything that it needs but the model's weights.

    Attributes:
        adapter, memory: what is trained, and the memory's options on this base.
        settings: what a run that goes on from this one's checkpoints must share.
        resumed: the checkpoint to go on from.
    """

    options: Options
    adapter: LoraConfig
    memory: NeurocacheOptions
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    documents: DocumentRow
    valid: list[HeldOut]
    checkpoints: Checkpoints
    settings: dict[str, Any]
    resumed: Path | None


def main(arguments: list[str] | None = None) -> None:
    """Train as the options say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser()
    options = Options(*parser.parse(arguments))
    try:
        if options.run.estimate:
            print(estimated(options).table())
            return
        plan = make_plan(options)
        model = load_model(plan)
    except (OSError, ValueError, ImportError, CheckpointError) as error:
        parser.error(str(error))
    run = make_run(plan, model)
    schedule = make_schedule(
        inner(run.optimizer), run.steps, int(options.train.warmup * run.steps), done=run.history.steps
    )
    failure = ""
    try:
        train(run, schedule, options.run.checkpoint_every, options.run.log_every, options.run.stop_after)
        finish(plan, run, arguments)
    except Stopped as stopped:
        run.accelerator.print(stopped)
    except (FloatingPointError, CheckpointError, OSError) as error:
        failure = str(error)
    except ProcessLost as error:
        sys.exit(f"\n{error}")
    accelerator = run.accelerator
    del run, model, schedule, plan
    end(accelerator)
    if failure:
        sys.exit(f"\n{failure}")


def make_parser() -> RecipeParser:
    kinds = [ModelOptions, DataOptions, TrainOptions, RunOptions, EvalOptions, HubOptions, MemoryOptions]
    return RecipeParser(kinds, (__doc__ or "").splitlines()[0])


def make_plan(options: Options) -> Plan:
    """Look at everything that can be wrong before a model is loaded.

    Raises:
        OSError, ValueError, ImportError, CheckpointError: something is; says what to do.
    """
    check_train_options(options.train, options.run)
    check_quantization(options.model.quantize)
    check_attention(options.model.attn_implementation)
    check_output(options.train.output, options.run)
    base = base_config(options.model.base)
    adapter, memory = adapter_config(base, options.train, options.memory)
    accelerator = make_accelerator(options.model.device, options.train.output, options.run)
    check_processes(accelerator, options.train, options.run.sharding, options.model.quantize)
    if is_gguf(options.model.base):
        with accelerator.main_process_first():  # it is converted once
            base_folder(options.model.base)
    tokenizer = load_tokenizer(options.model.base)
    documents = open_documents(options.data.train, tokenizer, options.data)
    documents.check(memory.segment_tokens)
    valid = valid_documents(options, tokenizer)
    if valid:
        check_controls(valid, options.evaluation, memory)
    settings = resumed_settings(
        options.model,
        options.data,
        options.train,
        options.memory,
        base=base_identity(base),
        documents=documents.identity(),
        processes=accelerator.num_processes,
        deepspeed=uses_deepspeed(accelerator),
    )
    checkpoints = Checkpoints(Path(options.train.output) / "checkpoints", options.run.keep_checkpoints)
    resumed = checkpoints.newest() if options.run.resume else None
    if resumed is not None:
        check_resumable(checkpoints.load(resumed)["settings"], settings, str(resumed))
    elif options.run.resume and checkpoints.paths():
        raise ValueError(
            f"All checkpoints in {checkpoints.folder} are damaged: look why, or start anew with --overwrite."
        )
    check_hub(options.hub, options.model.base)  # in every process: they all stop, or none
    checkpoints.claim()
    return Plan(options, adapter, memory, accelerator, tokenizer, documents, valid, checkpoints, settings, resumed)


def valid_documents(options: Options, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """The held-out documents; none if no evaluation is wanted."""
    wanted = options.evaluation
    if wanted.valid is None:
        return []
    least = options.data.min_tokens if wanted.valid_min_tokens is None else wanted.valid_min_tokens
    data = replace(options.data, stream=False, label_field=None, min_tokens=least)
    documents = open_documents(wanted.valid, tokenizer, data)
    assert isinstance(documents, Documents)
    return held_out(documents, wanted.valid_documents, wanted.valid_tokens)


def estimated(options: Options) -> Estimate:
    """The memory of a training step, from the base's configuration alone."""
    base, train = base_config(options.model.base), options.train
    check_train_options(train, options.run)
    adapter, memory = adapter_config(base, train, options.memory)
    processes = options.run.estimate_processes
    check_division(processes, train, options.run.sharding, options.model.quantize)
    dtype: Any = (base.dtype or torch.float32) if options.model.dtype == "auto" else getattr(torch, options.model.dtype)
    return estimate(
        base,
        adapter,
        lanes=train.lanes // processes,
        segment_tokens=memory.segment_tokens,
        accumulation=train.accumulation,
        backprop_segments=train.backprop_segments,
        dtype=dtype,
        quantize=None if options.model.quantize == "none" else options.model.quantize,
        optimizer=train.optimizer,
        activation_checkpointing=train.activation_checkpointing,
        processes=processes,
        sharding=None if options.run.sharding == "none" else options.run.sharding,
        device_type="cpu" if options.model.device == "cpu" else "cuda",
    )


def load_model(plan: Plan) -> PeftModel:
    """The base with a new adapter, in training mode; the same in every process."""
    base, _ = load_base(plan.options.model, plan.accelerator.device)
    torch.manual_seed(plan.options.train.seed)
    model: PeftModel = get_peft_model(base, plan.adapter)
    if plan.options.train.activation_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
        base.disable_input_require_grads()  # transformers asks for them; frozen layers below need no gradients
    if plan.options.train.method != "lora" and plan.options.train.memory_start == "states" and plan.resumed is None:
        plan.accelerator.print(f"Reading {plan.options.train.start_segments} segments to start the memory from.")
        start_memory(model, plan.documents, plan.memory.segment_tokens, plan.options.train)
    model.train()  # memories that begin now keep what training needs
    return model


def make_run(plan: Plan, model: PeftModel) -> TrainingRun:
    """The run at its first step, or as the checkpoint has it."""
    options, accelerator = plan.options.train, plan.accelerator
    trained = sum(parameter.numel() for parameter in trained_parameters(model))
    accelerator.print(
        f"{options.method} on {plan.options.model.base}: {trained:,} parameters to train, {plan.documents}, "
        f"{options.lanes} lane(s) of {plan.memory.segment_tokens} tokens, {options.steps} steps, "
        f"{accelerator.num_processes} process(es)"
    )
    gate_rate = options.memory_rate * options.gate_factor
    rates = Rates(options.lora_rate, options.memory_rate, gate_rate, options.weight_decay)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model, rates, options.optimizer)

    wrapped, optimizer = prepare(accelerator, model, optimizer_of, plan.options.run.sharding, options)
    torch.manual_seed(options.seed + accelerator.process_index)  # dropout differs between processes
    run = TrainingRun(
        accelerator=accelerator,
        model=wrapped,
        adapter=model,
        optimizer=optimizer,
        groups=make_groups(
            model,
            plan.documents,
            lanes=options.lanes,
            tokens=plan.memory.segment_tokens * options.backprop_segments,
            seed=options.seed,
            remembers=options.method != "lora",
            groups=options.accumulation,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
        ),
        checkpoints=plan.checkpoints,
        settings=plan.settings,
        steps=options.steps,
        clip=options.clip,
        history=History(),
    )
    if plan.resumed is None:
        plan.checkpoints.clear()
    else:
        run.restore(plan.resumed)
        accelerator.print(f"Going on from {plan.resumed}")
    accelerator.init_trackers("cacheformers", config={name: str(value) for name, value in plan.settings.items()})
    return run


def finish(plan: Plan, run: TrainingRun, arguments: list[str]) -> None:
    """Save the adapter, evaluate it, and write down what came out."""
    options, accelerator, history = plan.options, run.accelerator, run.history
    output = Path(options.train.output)
    weights = trained_state(run.adapter)
    if accelerator.is_main_process:
        save_adapter(output, run.adapter, weights)
        plan.tokenizer.save_pretrained(output)
    runs = evaluate_adapter(run.adapter, plan.valid, options.evaluation, plan.memory) if plan.valid else {}
    if not accelerator.is_main_process:
        return
    result = {
        "command": ["train_adapt.py", *arguments],
        "options": asdict(options),
        "environment": environment(accelerator.device, accelerator.num_processes),
        "trained_parameters": sum(tensor.numel() for tensor in weights.values()),
        **history.as_dict(),
        "scores": scores(runs) if runs else {},
    }
    write_text(output / "train_result.json", json.dumps(result, indent=1) + "\n")
    write_text(output / "README.md", model_card(result))
    print(
        f"\n{history.steps} steps, {history.seconds / history.steps:.2f} s a step; mean loss of the last 20: "
        f"{mean(history.losses[-20:]):.4f}"
    )
    if runs:
        print_runs(runs)
    if options.evaluation.plots:
        save_plots(output, runs, history.losses)
    print(f"\nAdapter, model card (README.md), train_result.json and plots are in {output}")
    if options.hub.push_to_hub is not None:
        print(f"Pushed: {publish(output, options.hub)}")


def end(accelerator: Accelerator) -> None:
    """Close the trackers and the connections between processes.

    The model must be gone before: a DDP model that outlives its connections can wait for ever when it is freed (gloo).
    """
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
