"""Train a model to read with a memory, on long documents: an adapter on a pretrained model, or all of a new one.

python train_adapt.py recipes/smollm2_books.yaml
python train_adapt.py recipes/smollm2_books.yaml --method lora --output runs/books_lora --steps 50
torchrun --nproc_per_node 8 train_adapt.py recipes/mistral_7b_longpile.yaml --resume
python train_adapt.py recipes/scratch_books.yaml --model_config recipes/model_configs/books_neurocache.json

main: make_plan (check everything) -> load_model -> make_run -> train -> finish (save, evaluate, write results)
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from cacheformers.common.loss import IGNORED, token_losses
from cacheformers.evaluation.model import evaluate_model
from cacheformers.hub.card import earlier_card
from cacheformers.modeling.architectures import find_decoder, unwrap
from cacheformers.modeling.reading import text_of
from cacheformers.modeling.segments import close_segments, reader
from cacheformers.training.checkpoints import CheckpointError
from cacheformers.training.distillation import distilled
from cacheformers.training.lanes import Group, Step, make_groups
from cacheformers.training.optim import freeze_idle_gates, make_optimizer, make_schedule, trained_parameters
from cacheformers.training.plan import Options, Plan, check_given, estimated, make_parser, make_plan
from cacheformers.training.processes import prepare, total
from cacheformers.training.results import write_results
from cacheformers.training.run import (
    History,
    ProcessLost,
    Stopped,
    Stopping,
    Trained,
    TrainingRun,
    inner,
    save_trained,
    trained_state,
)
from cacheformers.training.statistics import in_brief, memory_statistics


def main(arguments: list[str] | None = None) -> None:
    """Train as a recipe and the command line say."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(arguments, (__doc__ or "").splitlines()[0])
    options = Options(*parser.parse(arguments))
    try:
        check_given(options, parser.given)
        if options.run.estimate:
            print(estimated(options).table())
            return
        plan = make_plan(options)
        model = load_model(plan)
        run = make_run(plan, model)
    except (OSError, ValueError, ImportError, CheckpointError) as error:
        parser.error(str(error))
    failure = ""
    try:
        train(plan, run)
        finish(plan, run, arguments)
    except Stopped as stopped:
        run.accelerator.print(stopped)
    except (FloatingPointError, CheckpointError, OSError) as error:
        failure = str(error)
    except ProcessLost as error:
        sys.exit(f"\n{error}")
    except ValueError as error:  # such as a document that cannot be read
        failure = f"{error}\n{run.left()}"
        if run.accelerator.num_processes > 1:  # the others may not have met it, and would be waited for
            sys.exit(f"\n{failure}")
    accelerator = run.accelerator
    del run, model, plan  # a DDP model that outlives its connections can wait forever when it is freed (gloo)
    accelerator.free_memory()
    accelerator.end_training()
    if failure:
        sys.exit(f"\n{failure}")


def load_model(plan: Plan) -> Trained:
    """Make the model as it starts, in training mode; it is the same in every process."""
    model = plan.subject.make(plan.accelerator, plan.documents, resumed=plan.resumed is not None)
    if plan.subject.remembers:
        freeze_idle_gates(model, plan.subject.memory)
    model.train()  # memories that begin now keep what training needs
    return model


def make_run(plan: Plan, model: Trained) -> TrainingRun:
    """Set up optimizer, lanes and memories, at the first step or where the checkpoint left them."""
    options, accelerator, subject = plan.options.train, plan.accelerator, plan.subject
    trained = sum(parameter.numel() for parameter in trained_parameters(model))
    accelerator.print(
        f"{subject.title}: {trained:,} parameters to train, {plan.documents}, "
        f"{options.lanes} lane(s) of {subject.memory.segment_tokens} tokens, {options.steps} steps, "
        f"{accelerator.num_processes} process(es)"
    )
    if accelerator.is_main_process:
        print(share_of_data(plan))
    make = partial(make_optimizer, rates=subject.rates, name=options.optimizer)
    wrapped, optimizer = prepare(accelerator, model, make, plan.options.run.sharding)
    torch.manual_seed(options.seed + accelerator.process_index)  # dropout differs between processes
    groups = make_groups(
        model,
        plan.documents,
        lanes=options.lanes,
        tokens=subject.memory.segment_tokens * options.backprop_segments,
        seed=options.seed,
        remembers=subject.remembers,
        groups=options.accumulation,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
        teacher_tokens=subject.memory.base.max_positions if plan.options.lessons.distill_all else 0,
        questions=plan.options.lessons.questions_per_step,
        backprop_context=subject.memory.segment_tokens * plan.options.lessons.backprop_context,
    )
    if plan.options.lessons.questions is not None:
        check_questions(groups)
    run = TrainingRun(
        accelerator, wrapped, model, optimizer, groups, plan.checkpoints, plan.settings, options.steps, History()
    )
    if plan.resumed is None:
        plan.checkpoints.clear()
    else:
        run.restore(plan.resumed)
        accelerator.print(f"Going on from {plan.resumed}")
    accelerator.init_trackers("cacheformers", config={name: str(value) for name, value in plan.settings.items()})
    return run


def check_questions(groups: Sequence[Group]) -> None:
    """Raise ValueError where a question would stay in the memory: asked in one lane while another one reads."""
    memory = groups[0].memory
    if memory is not None and memory.batch_size > 1 and not memory.state.can_crop:
        raise ValueError(
            f"This method cannot forget the question of one lane while others read, and {memory.batch_size} lanes go "
            "through the model together: choose lanes = processes x accumulation."
        )


def share_of_data(plan: Plan) -> str:
    """Say how many tokens there are, and how much of them the run will see."""
    options, lessons = plan.options.train, plan.options.lessons
    if lessons.questions is not None:
        most = options.steps * options.lanes * lessons.questions_per_step
        return f"{options.steps} steps ask at most {most:,} questions."
    read = options.steps * options.lanes * plan.subject.memory.segment_tokens * options.backprop_segments
    there = plan.documents.total_tokens()
    if there is None:
        return f"{options.steps} steps learn from at most {read:,} tokens."
    parts = getattr(plan.documents, "places", None) is not None
    return (
        f"About {there:,} tokens in the documents; {options.steps} steps learn from at most {read:,}: "
        f"{read / max(there, 1):.3g} of an epoch{', and segments without labels are read on top' if parts else ''}."
    )


def train(plan: Plan, run: TrainingRun) -> None:
    """Train until all steps are done.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
        Stopped: the run was asked to stop, or is out of time; a checkpoint was written.
        ProcessLost: another process died.
    """
    options, accelerator, history = plan.options.run, run.accelerator, run.history
    warmup = int(plan.options.train.warmup * run.steps)
    schedule = make_schedule(inner(run.optimizer), run.steps, warmup, done=history.steps)
    run.model.train()
    bar = tqdm(
        initial=history.steps,
        total=run.steps,
        desc="Training",
        unit=" steps",
        disable=not accelerator.is_main_process,
    )
    read, start = history.tokens, time.monotonic() - history.seconds
    with bar, Stopping(options.stop_after) as stopping, run.watching():
        while history.steps < run.steps:
            norm, stop = step(run, plan.options.train.clip, plan.options.lessons.distill, stopping)
            rates = {f"rate_{group['name']}": group["lr"] for group in run.optimizer.param_groups}
            schedule.step()
            history.seconds = time.monotonic() - start
            bar.update()
            speed = (history.tokens - read) / max(bar.format_dict["elapsed"], 1e-9)
            last = history.steps == run.steps
            if last or history.steps % options.log_every == 0:
                log(run, {"gradient_norm": norm, "tokens_per_second": speed, **rates})
            logged = in_brief(history.log[-1]) if history.log else ""
            bar.set_postfix_str(f"loss {mean(history.losses[-20:]):.3f}, {speed:,.0f} tokens/s{logged}")
            if last or stop or (options.checkpoint_every and history.steps % options.checkpoint_every == 0):
                run.save(needed=last or stop)
            if stop and not last:
                raise Stopped(f"Stopped after step {history.steps} of {run.steps}. Go on with --resume.")


def step(run: TrainingRun, clip: float, distill: float, stopping: Stopping) -> tuple[float, bool]:
    """Make one optimizer step over the next segment of every lane of every process.

    Args:
        distill: share of the loss that is learned from the base with full attention.

    Returns:
        The gradients' norm before clipping, and whether some process was asked to stop.
    """
    accelerator, processes = run.accelerator, run.accelerator.num_processes
    batches, targets = next_batches(run)
    own = [group.own_targets(batch) for group, batch in zip(run.groups, batches, strict=True)]
    [all_own] = total(accelerator, sum(own))
    nats, suspects = 0.0, []
    for group, batch, tokens in zip(run.groups, batches, own, strict=True):
        last = group is run.groups[-1]
        with contextlib.nullcontext() if last else accelerator.no_sync(run.model):
            losses = read_segment(run.model, group, batch, accelerator.device, run.trained, distill)
            # Gradients are averaged over processes; the loss is a mean over the tokens of all.
            objective = losses.sum() * (processes / targets)
            accelerator.backward(objective + group.own_loss() * (tokens * processes / max(all_own, 1)))
        group.end()
        rows = losses.detach().sum(1).tolist()
        nats += sum(rows)
        suspects += [document for document, row in zip(batch.documents, rows, strict=True) if not math.isfinite(row)]

    all_nats, stop = total(accelerator, nats, float(stopping.wanted))
    norm = accelerator.clip_grad_norm_(run.model.parameters(), clip) if math.isfinite(all_nats) else math.nan
    if not math.isfinite(norm):
        if math.isfinite(all_nats):  # only the gradient is not finite: any document may be the cause
            suspects = [document for batch in batches for document in batch.documents]
        raise FloatingPointError(run.not_finite(suspects, all_nats / targets))
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.release_documents()
    run.history.losses.append(all_nats / targets)
    return float(norm), bool(stop)


def next_batches(run: TrainingRun) -> tuple[list[Step], float]:
    """Return the next segments that have labels, and the number of labels in all processes.

    Segments before them that have no label are read into the memories without a step.
    """
    while True:
        batches = [group.begin(run.trained, group.lanes.step()) for group in run.groups]
        targets, tokens = total(
            run.accelerator, sum(batch.targets for batch in batches), sum(batch.tokens for batch in batches)
        )
        run.history.tokens += int(tokens)
        if targets:
            return batches, targets
        for group, batch in zip(run.groups, batches, strict=True):
            read_context(run, group, batch)


def read_context(run: TrainingRun, group: Group, batch: Step) -> None:
    """Read segments without labels into a group's memory, which closes them; layers above the last that stores rest."""
    memory = group.memory if all(piece.context for piece in batch.pieces) else None
    with torch.set_grad_enabled(batch.keeps_graph), contextlib.nullcontext() if memory is None else text_of(memory):
        read_unlabeled(run, group, batch)


def read_unlabeled(run: TrainingRun, group: Group, batch: Step) -> None:
    """Do what `read_context` does, with gradients or without."""
    if group.memory is None or any(isinstance(weight, DTensor) for weight in run.trained.parameters()):
        read_segment(run.model, group, batch, run.accelerator.device)  # FSDP2 gathers weights for whole forwards
        return
    decoder = find_decoder(unwrap(run.trained))
    inputs = forward_inputs(group, batch, run.accelerator.device)
    with run.accelerator.autocast():
        reader(decoder, group.memory)(**inputs, memory_keep=1)
    try:
        close_segments(decoder, group.memory, range(group.memory.batch_size))
    except ValueError as error:
        names = "; ".join(run.groups[0].lanes.documents.name(document) for document in batch.documents)
        raise ValueError(f"Reading {names} before step {run.history.steps + 1}: {error}") from error


def read_segment(
    model: nn.Module,
    group: Group,
    batch: Step,
    device: torch.device,
    teacher: Trained | None = None,
    distill: float = 0.0,
) -> torch.Tensor:
    """Return the losses of a batch of segments; the group's memory has read them afterwards.

    Args:
        teacher: the model, whose base without the adapter teaches a share `distill` of the loss.

    Returns:
        `[rows, places]`, of the places where some row has a label: nothing else needs logits.
    """
    places = (batch.labels != IGNORED).any(0).nonzero()[:, 0]
    labels = batch.labels[:, places].to(device)
    output = model(**forward_inputs(group, batch, device), logits_to_keep=places.to(device))
    losses = token_losses(output.logits, labels)
    if teacher is None or not distill:
        return losses
    return distilled(teacher, losses, output.logits, labels, batch.teachers, distill)


def forward_inputs(group: Group, batch: Step, device: torch.device) -> dict[str, Any]:
    """Return the inputs of a forward over a batch, whose memory reads it."""
    longest = int(batch.attention_mask.sum(1).max())  # where all documents end, nothing but padding would follow
    ids, mask = batch.input_ids[:, :longest], batch.attention_mask[:, :longest]
    return {
        "input_ids": ids.to(device),
        "attention_mask": None if bool(mask.all()) else mask.to(device),
        "past_key_values": group.asked,
        "use_cache": group.asked is not None,
    }


def log(run: TrainingRun, entry: dict[str, Any]) -> None:
    """Add an entry to the history's log and to the trackers. Every process must call this."""
    history = run.history
    memories = [group.asked for group in run.groups if group.asked is not None]
    statistics = memory_statistics(run.trained, memories)
    entry = {"step": history.steps, "loss": history.losses[-1], **entry, **statistics}
    history.log.append(entry)
    run.accelerator.log({name: value for name, value in entry.items() if not isinstance(value, list)}, history.steps)


def finish(plan: Plan, run: TrainingRun, arguments: list[str]) -> None:
    """Save what was trained, evaluate it, and write results, model card and plots."""
    output = Path(plan.options.train.output)
    weights, earlier = trained_state(run.trained), earlier_card(output)
    if run.accelerator.is_main_process:
        save_trained(output, run.trained, weights)
        plan.tokenizer.save_pretrained(output)
    runs = {}
    if plan.valid:
        runs = evaluate_model(run.trained, plan.valid, plan.options.evaluation, plan.subject.memory)
    if run.accelerator.is_main_process:
        write_results(plan, run, weights, runs, earlier, arguments)


if __name__ == "__main__":
    main()
