"""The training loop: every lane reads its next segment, then the optimizer makes a step.

labels of all lanes counted -> forward and backward, batch by batch -> clip -> step -> perhaps a checkpoint
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from cacheformers.common.loss import token_losses
from cacheformers.training.checkpoints import CheckpointError, Checkpoints
from cacheformers.training.groups import Group
from cacheformers.training.history import History
from cacheformers.training.lanes import Step
from cacheformers.training.run_state import (
    optimizer_state,
    restore_own,
    restore_shared,
    trained_state,
    write_own,
    write_shared,
)
from cacheformers.training.statistics import (
    gate_statistics,
    retrieval_statistics,
    share_statistics,
    token_gate_statistics,
)
from cacheformers.training.stopping import Stopping
from cacheformers.training.subject import Trained


class Stopped(Exception):
    """The run was asked to stop before its last step, and has written a checkpoint."""


class ProcessLost(RuntimeError):
    """Another process of the run is gone, so that this one cannot go on."""


@dataclass
class TrainingRun:
    """A run: the model as Accelerate prepared it, and everything that changes while it is trained.

    Attributes:
        trained: the model without Accelerate's wrapper.
        settings: what a run that goes on from this one's checkpoints must share.
    """

    accelerator: Accelerator
    model: nn.Module
    trained: Trained
    optimizer: Any  # torch's, perhaps inside wrappers of Accelerate and DeepSpeed
    groups: list[Group]
    checkpoints: Checkpoints
    settings: dict[str, Any]
    steps: int
    clip: float
    history: History

    def save(self) -> Path:
        """Write a checkpoint. Every process must call this."""
        weights, moments = trained_state(self.trained), optimizer_state(self.trained, self.optimizer)
        process = self.accelerator.process_index

        def write(folder: Path) -> None:
            if self.accelerator.is_main_process:
                write_shared(folder, self.trained, weights, moments)
            write_own(folder, self.groups, self.optimizer, process)

        contents = {"settings": self.settings, "history": self.history.as_dict()}
        return self.checkpoints.save(self.history.steps, write, contents)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint. Every process must call this."""
        restore_shared(path, self.trained, self.optimizer)
        restore_own(path, self.groups, self.optimizer, self.accelerator.process_index, self.accelerator.device)
        self.history = History(**self.checkpoints.load(path)["history"])
        self.release_documents()

    def release_documents(self) -> None:
        """Let go of documents that all lanes of this process have left behind."""
        documents = self.groups[0].lanes.documents
        documents.release(min(position for group in self.groups for position in group.lanes.position))


def train(
    run: TrainingRun, schedule: LRScheduler, checkpoint_every: int, log_every: int, stop_after: float | None
) -> None:
    """Train until all steps are done.

    Args:
        checkpoint_every: steps; 0 for a checkpoint at the end only.
        stop_after: minutes.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
        Stopped: asked to stop, or out of time; a checkpoint was written.
        ProcessLost: another process died.
    """
    run.model.train()
    accelerator, history = run.accelerator, run.history
    bar = tqdm(
        initial=history.steps,
        total=run.steps,
        desc="Training",
        unit=" steps",
        disable=not accelerator.is_main_process,
    )
    read = history.tokens
    start = time.monotonic() - history.seconds
    with bar, Stopping(stop_after) as stopping, watching(run):
        while history.steps < run.steps:
            norm, stop = step(run, stopping)
            rates = {f"rate_{group['name']}": group["lr"] for group in run.optimizer.param_groups}
            schedule.step()
            history.seconds = time.monotonic() - start
            bar.update()
            speed = (history.tokens - read) / max(bar.format_dict["elapsed"], 1e-9)
            bar.set_postfix_str(f"loss {mean(history.losses[-20:]):.3f}, {speed:,.0f} tokens/s")
            if history.steps % log_every == 0 or history.steps == run.steps:
                log(run, {"gradient_norm": norm, "tokens_per_second": speed, **rates})
            last = history.steps == run.steps
            if last or stop or (checkpoint_every and history.steps % checkpoint_every == 0):
                save(run, needed=last or stop)
            if stop and not last:
                raise Stopped(f"Stopped after step {history.steps} of {run.steps}. Go on with --resume.")


def step(run: TrainingRun, stopping: Stopping) -> tuple[float, bool]:
    """One optimizer step over the next segment of every lane of every process.

    Returns:
        The gradients' norm before clipping, and whether some process is to stop.
    """
    accelerator = run.accelerator
    batches, targets = next_batches(run)
    own = [own_targets(group, batch) for group, batch in zip(run.groups, batches, strict=True)]
    [all_own] = total(accelerator, sum(own))
    nats, suspects = 0.0, []
    for group, batch, tokens in zip(run.groups, batches, own, strict=True):
        last = group is run.groups[-1]
        with contextlib.nullcontext() if last else accelerator.no_sync(run.model):
            losses = read_segment(run.model, group, batch, accelerator.device)
            # Gradients are averaged over processes; the loss is a mean over the tokens of all.
            objective = losses.sum() * (accelerator.num_processes / targets)
            share = tokens * accelerator.num_processes / max(all_own, 1)
            accelerator.backward(objective + own_loss(group) * share)
        rows = losses.detach().sum(1).tolist()
        nats += sum(rows)
        suspects += [document for document, row in zip(batch.documents, rows, strict=True) if not math.isfinite(row)]

    all_nats, stop = total(accelerator, nats, float(stopping.wanted))
    norm = accelerator.clip_grad_norm_(run.model.parameters(), run.clip) if math.isfinite(all_nats) else math.nan
    if not math.isfinite(all_nats) or not math.isfinite(norm):
        if math.isfinite(all_nats):  # only the gradient is not: any document may be the cause
            suspects = [document for batch in batches for document in batch.documents]
        raise FloatingPointError(not_finite(run, suspects, all_nats / targets))
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.release_documents()
    run.history.losses.append(all_nats / targets)
    return float(norm), bool(stop)


def own_loss(group: Group) -> torch.Tensor | float:
    """What a method adds to the loss (the gates of gated attention), weighted: a mean over `own_targets`."""
    loss: torch.Tensor | None = None if group.memory is None else getattr(group.memory.state, "loss", None)
    return 0.0 if loss is None else loss


def own_targets(group: Group, batch: Step) -> int:
    """Over how many tokens of a batch a method's own loss is a mean."""
    memory = group.memory
    if memory is None or not hasattr(memory.state, "loss_targets"):
        return 0
    return int(memory.state.loss_targets(memory.tokens_read, batch.attention_mask.sum(1).tolist()))


def next_batches(run: TrainingRun) -> tuple[list[Step], float]:
    """The next segments that have labels, and how many these are in all processes; those before are only read."""
    while True:
        batches = [group.lanes.step() for group in run.groups]
        for group, batch in zip(run.groups, batches, strict=True):
            if group.memory is not None:
                group.memory.reset(batch.reset.nonzero()[:, 0].tolist())
        targets, tokens = total(
            run.accelerator, sum(batch.targets for batch in batches), sum(batch.tokens for batch in batches)
        )
        run.history.tokens += int(tokens)
        if targets:
            return batches, targets
        with torch.no_grad():
            for group, batch in zip(run.groups, batches, strict=True):
                read_segment(run.model, group, batch, run.accelerator.device)


def read_segment(model: nn.Module, group: Group, batch: Step, device: torch.device) -> torch.Tensor:
    """The losses `[rows, tokens]` of a batch of segments; the group's memory has read them afterwards."""
    memory = group.memory
    longest = int(batch.attention_mask.sum(1).max())  # where all documents end, nothing but padding would follow
    ids, labels, mask = (part[:, :longest] for part in (batch.input_ids, batch.labels, batch.attention_mask))
    output = model(
        input_ids=ids.to(device),
        attention_mask=None if bool(mask.all()) else mask.to(device),
        past_key_values=memory,
        use_cache=memory is not None,
    )
    return token_losses(output.logits, labels.to(device))


def total(accelerator: Accelerator, *numbers: float) -> list[float]:
    """Sums over all processes."""
    if accelerator.num_processes == 1:
        return list(numbers)
    sums: list[float] = accelerator.reduce(
        torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    ).tolist()
    return sums


def not_finite(run: TrainingRun, suspects: list[int], loss: float) -> str:
    """What to say of a loss or gradient that is NaN or Inf. Every process must call this.

    Args:
        suspects: documents of this process that may be the cause.
    """
    documents = run.groups[0].lanes.documents
    names = gather_object([documents.name(document) for document in suspects])
    number = run.history.steps + 1
    what = f"The loss of step {number} is {loss}."
    if math.isfinite(loss):
        what = f"The gradient of step {number} is not finite (its loss is {loss:.4f})."
    good = run.checkpoints.newest()
    kept = f"The last good checkpoint is {good}." if good else "There is no checkpoint yet, and nothing was saved."
    return (
        f"{what} Read: {'; '.join(names)}. {kept} Look at these documents, try lower rates (--gate_factor first) or, "
        "instead of float16, bfloat16."
    )


def save(run: TrainingRun, needed: bool) -> None:
    """Write a checkpoint; a failure ends the run only if this was the last chance to keep its work."""
    try:
        run.save()
    except CheckpointError as error:
        if needed:
            raise
        # At once: in a file it would otherwise stand after what goes to stderr later.
        run.accelerator.print(f"{error} Training goes on; the next try is at the next checkpoint.", flush=True)


def log(run: TrainingRun, entry: dict[str, Any]) -> None:
    """Add to the history's log and to the trackers. Every process must call this."""
    memories = [group.memory for group in run.groups if group.memory is not None]
    entry = {
        "step": run.history.steps,
        "loss": run.history.losses[-1],
        **entry,
        **gate_statistics(run.trained),
        **share_statistics(run.trained),
        **token_gate_statistics(memories),
        **retrieval_statistics(memories),
    }
    run.history.log.append(entry)
    run.accelerator.log(
        {key: value for key, value in entry.items() if not isinstance(value, list)}, step=run.history.steps
    )


@contextlib.contextmanager
def watching(run: TrainingRun) -> Iterator[None]:
    """Say what happened when another process is gone, instead of what the network made of it."""
    try:
        yield
    except RuntimeError as error:
        if run.accelerator.num_processes == 1 or isinstance(error, (CheckpointError, ProcessLost)):
            raise
        lost = isinstance(error, torch.distributed.DistError) or any(
            word in str(error) for word in ("gloo", "NCCL", "Connection closed", "Connection reset")
        )
        if not lost:
            raise
        raise ProcessLost(
            f"Process {run.accelerator.process_index} of {run.accelerator.num_processes} stopped after step "
            f"{run.history.steps}: another process is gone (its own output says why). Start all of them again with "
            f"--resume: the newest checkpoint is in {run.checkpoints.folder}."
        ) from error
