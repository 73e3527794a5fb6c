"""Train a model to read with a memory, on long documents: an adapter on a pretrained model, or all of a new one.

python train_adapt.py recipes/smollm2_books.yaml
python train_adapt.py recipes/smollm2_books.yaml --method lora --output runs/books_lora --steps 50
torchrun --nproc_per_node 8 train_adapt.py recipes/mistral_7b_longpile.yaml --resume
python train_adapt.py recipes/scratch_books.yaml --model_config recipes/model_configs/books_neurocache.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedTokenizerBase

from cacheformers.evaluation.model import check_evaluation, evaluate_model
from cacheformers.evaluation.model_card import adapter_card, scratch_card
from cacheformers.evaluation.options import EvalOptions
from cacheformers.evaluation.perplexity import HeldOut, held_out
from cacheformers.evaluation.plots import save_plots
from cacheformers.evaluation.run import scores
from cacheformers.evaluation.tables import print_runs
from cacheformers.hub.card import earlier_card, renewed
from cacheformers.training.adapter import Adaptation, adapter_config
from cacheformers.training.base_model import StartOptions, base_config
from cacheformers.training.checkpoints import CheckpointError, Checkpoints, write_text
from cacheformers.training.documents import DataOptions, DocumentRow, Documents, check_lengths, open_documents
from cacheformers.training.environment import environment
from cacheformers.training.estimate import Estimate, estimate
from cacheformers.training.groups import make_groups
from cacheformers.training.history import History
from cacheformers.training.loop import ProcessLost, Stopped, TrainingRun, train
from cacheformers.training.methods import MethodOptions, chosen_options, names, of_other_methods
from cacheformers.training.optim import (
    freeze_idle_gates,
    make_optimizer,
    make_schedule,
    parameter_groups,
    trained_parameters,
)
from cacheformers.training.options import RecipeParser
from cacheformers.training.processes import check_division, check_processes, make_accelerator, prepare, uses_deepspeed
from cacheformers.training.publishing import HubOptions, check_hub, publish
from cacheformers.training.run_state import inner, save_trained, trained_state
from cacheformers.training.scratch import Scratch, ScratchOptions, check_given
from cacheformers.training.settings import (
    RunOptions,
    TrainOptions,
    check_output,
    check_resumable,
    check_train_options,
    resumed_settings,
)
from cacheformers.training.subject import Subject, Trained


@dataclass
class Options:
    """A recipe: its options by topic."""

    model: StartOptions
    data: DataOptions
    train: TrainOptions
    run: RunOptions
    evaluation: EvalOptions
    hub: HubOptions
    scratch: ScratchOptions
    memory: MethodOptions


@dataclass
class Plan:
    """A checked recipe: everything that it needs but the model's weights.

    Attributes:
        subject: what is trained.
        settings: what a run that goes on from this one's checkpoints must share.
        resumed: the checkpoint to go on from.
    """

    options: Options
    subject: Subject
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
    parser = make_parser(arguments)
    options = Options(*parser.parse(arguments))
    try:
        check_given(options.model.init, parser.given, names(type(options.memory)))
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


def make_parser(arguments: Sequence[str] = ()) -> RecipeParser:
    """The parser of all options, among them those of the method that the arguments choose."""
    kinds = [StartOptions, DataOptions, TrainOptions, RunOptions, EvalOptions, HubOptions, ScratchOptions]
    memory = chosen_options(arguments)
    return RecipeParser([*kinds, memory], (__doc__ or "").splitlines()[0], of_other_methods(memory))


def make_plan(options: Options) -> Plan:
    """Look at everything that can be wrong before a model is loaded.

    Raises:
        OSError, ValueError, ImportError, CheckpointError: something is; says what to do.
    """
    check_train_options(options.train, options.run)
    check_output(options.train.output, options.run)
    subject = make_subject(options)
    accelerator = make_accelerator(
        options.model.device, options.train.output, options.run, precision=options.scratch.precision
    )
    check_processes(accelerator, options.train, options.run.sharding, options.model.quantize)
    tokenizer = subject.tokenizer(accelerator)
    check_lengths(options.data, subject.memory)
    documents = open_documents(options.data.train, tokenizer, options.data)
    documents.check(subject.memory.segment_tokens)
    valid = valid_documents(options, tokenizer)
    if valid:
        check_evaluation(valid, options.evaluation, subject.memory)
    settings = resumed_settings(
        options.data,
        options.train,
        documents=documents.identity(),
        processes=accelerator.num_processes,
        deepspeed=uses_deepspeed(accelerator),
        **subject.settings(),
    )
    checkpoints = Checkpoints(Path(options.train.output) / "checkpoints", options.run.keep_checkpoints)
    resumed = checkpoints.newest() if options.run.resume else None
    if resumed is not None:
        check_resumable(checkpoints.load(resumed)["settings"], settings, str(resumed))
    elif options.run.resume and checkpoints.paths():
        raise ValueError(
            f"All checkpoints in {checkpoints.folder} are damaged: look why, or start anew with --overwrite."
        )
    check_hub(options.hub, subject.base)  # in every process: they all stop, or none
    checkpoints.claim()
    return Plan(options, subject, accelerator, tokenizer, documents, valid, checkpoints, settings, resumed)


def make_subject(options: Options) -> Subject:
    """What is trained: an adapter, or a whole model."""
    if options.model.init == "scratch":
        return Scratch(options.model, options.train, options.scratch)
    return Adaptation(options.model, options.train, options.memory)


def valid_documents(options: Options, tokenizer: PreTrainedTokenizerBase) -> list[HeldOut]:
    """The held-out documents; none if no evaluation is wanted."""
    wanted = options.evaluation
    if wanted.valid is None:
        return []
    least = options.data.min_tokens if wanted.valid_min_tokens is None else wanted.valid_min_tokens
    data = replace(options.data, stream=False, label_field=None, min_tokens=least)
    documents = open_documents(wanted.valid, tokenizer, data, split="validation")
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


def load_model(plan: Plan) -> Trained:
    """The model as it starts, in training mode; the same in every process."""
    model = plan.subject.make(plan.accelerator, plan.documents, resumed=plan.resumed is not None)
    if plan.subject.remembers:
        freeze_idle_gates(model, plan.subject.memory)
    model.train()  # memories that begin now keep what training needs
    return model


def make_run(plan: Plan, model: Trained) -> TrainingRun:
    """The run at its first step, or as the checkpoint has it."""
    options, accelerator, subject = plan.options.train, plan.accelerator, plan.subject
    trained = sum(parameter.numel() for parameter in trained_parameters(model))
    accelerator.print(
        f"{subject.title}: {trained:,} parameters to train, {plan.documents}, "
        f"{options.lanes} lane(s) of {subject.memory.segment_tokens} tokens, {options.steps} steps, "
        f"{accelerator.num_processes} process(es)"
    )

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model, subject.rates, options.optimizer)

    wrapped, optimizer = prepare(accelerator, model, optimizer_of, plan.options.run.sharding, options)
    torch.manual_seed(options.seed + accelerator.process_index)  # dropout differs between processes
    run = TrainingRun(
        accelerator=accelerator,
        model=wrapped,
        trained=model,
        optimizer=optimizer,
        groups=make_groups(
            model,
            plan.documents,
            lanes=options.lanes,
            tokens=subject.memory.segment_tokens * options.backprop_segments,
            seed=options.seed,
            remembers=subject.remembers,
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
    """Save what was trained, evaluate it, and write down what came out."""
    options, accelerator, history = plan.options, run.accelerator, run.history
    output = Path(options.train.output)
    weights, earlier = trained_state(run.trained), earlier_card(output)
    if accelerator.is_main_process:
        save_trained(output, run.trained, weights)
        plan.tokenizer.save_pretrained(output)
    runs = evaluate_model(run.trained, plan.valid, options.evaluation, plan.subject.memory) if plan.valid else {}
    if not accelerator.is_main_process:
        return
    result = {
        "command": ["train_adapt.py", *arguments],
        "options": asdict(options),
        "environment": environment(accelerator.device, accelerator.num_processes, plan.subject.base),
        "trained_parameters": sum(tensor.numel() for tensor in weights.values()),
        "rates": {group["name"]: group["lr"] for group in parameter_groups(run.trained, plan.subject.rates)},
        **history.as_dict(),
        "scores": scores(runs) if runs else {},
    }
    write_text(output / "train_result.json", json.dumps(result, indent=1) + "\n")
    card = adapter_card(result) if plan.subject.base else scratch_card(result, output)
    write_text(output / "README.md", renewed(card, earlier))
    print(
        f"\n{history.steps} steps, {history.seconds / history.steps:.2f} s a step; mean loss of the last 20: "
        f"{mean(history.losses[-20:]):.4f}"
    )
    if runs:
        print_runs(runs)
    if options.evaluation.plots:
        save_plots(output, runs, history.losses)
    print(f"\nWeights, model card (README.md), train_result.json and plots are in {output}")
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
