"""How much memory a training step takes, before anything is loaded.

The real model with the real adapter fills its memory and makes a real step, on tensors that hold no numbers
(`training/tracker.py`). What several processes divide is arithmetic. Not counted: what the process takes before it
builds a model, pages and scratch of libraries (20 to 46 MiB on a CPU), a GPU's own context, and fragmentation. On a CPU
glibc's malloc keeps activations that were freed, while the optimizer works: `Estimate.most` counts all of them again.
docs/results/estimate.md and docs/results/seven_b.md compare with measurements.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from cacheformers.adapters.config import MemoryAdapterConfig
from cacheformers.common.base_model import checkpoint_activations
from cacheformers.common.loss import token_losses
from cacheformers.modeling.architectures import base_shape, find_decoder
from cacheformers.modeling.memory import EVERYTHING
from cacheformers.modeling.segments import close_segments, new_memory
from cacheformers.training.in_turn import InTurn
from cacheformers.training.lanes import Group
from cacheformers.training.optim import Rates, freeze_idle_gates, make_optimizer, trained_parameters
from cacheformers.training.tracker import FakeTracker, Tracker

# nf4 with double quantization: half a byte, a byte for the scale of 64 weights, a float32 for 256 scales.
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)

# What memory holds, in the order of the table.
PARTS = (
    *("weights", "adapter", "gathered layers", "optimizer", "memory", "gradients"),
    *("activations", "working copies"),
)
GIVE_BACK = "MALLOC_MMAP_THRESHOLD_=65536"
IN_TURN = InTurn()
DIVIDED = ("gradients", "optimizer", "working copies", "weights", "adapter")  # by FSDP2


@dataclass(frozen=True)
class Estimate:
    """Bytes that one process needs in a training step.

    Attributes:
        parameters, trained: numbers in the base and in the adapter.
        tokens: how much of its document each lane has read before the step.
        moments: the largest total of each part of the step (`forward`, `backward`, `update`), by what it consists of.
        on_cpu: whether tensors are in the memory of the process, as its malloc manages it.
    """

    parameters: int
    trained: int
    tokens: int
    moments: dict[str, dict[str, int]]
    on_cpu: bool

    @property
    def totals(self) -> dict[str, int]:
        """Bytes at each moment."""
        return {moment: sum(parts.values()) for moment, parts in self.moments.items()}

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return max(self.totals.values())

    @property
    def most(self) -> int:
        """Bytes of the process where malloc keeps all activations that were freed: tensors below 32 MiB, with glibc."""
        return self.peak + max(parts.get("activations", 0) for parts in self.moments.values())

    def table(self) -> str:
        """Show the estimate in GiB."""
        parts = [part for part in PARTS if any(held.get(part) for held in self.moments.values())]
        lines = [
            f"{self.parameters:,} parameters in the base, {self.trained:,} to train",
            f"A step after {self.tokens:,} tokens of each document",
            f"\n{'GiB in each process':<24}" + "".join(f"{moment:>10}" for moment in self.moments),
        ]
        for part in parts:
            lines.append(f"{part:<24}" + "".join(f"{gib(held.get(part, 0)):>10}" for held in self.moments.values()))
        lines.append(f"{'total':<24}" + "".join(f"{gib(total):>10}" for total in self.totals.values()))
        worst = max(self.totals, key=self.totals.__getitem__)
        lines.append(f"\nPeak: {gib(self.peak)} GiB ({worst}).")
        if self.on_cpu:
            lines.append(f"Up to {gib(self.most)} GiB where malloc keeps freed activations: {GIVE_BACK} prevents that.")
        return "\n".join(lines)


def gib(size: int) -> str:
    """Format bytes as GiB with two decimals."""
    return f"{size / 2**30:.2f}"


@dataclass(frozen=True)
class Work:
    """Say what one process does in a training step.

    Attributes:
        lanes: documents that it reads side by side.
        accumulation: micro-batches a step; each reads `lanes / accumulation` rows.
        questions: rows of the step for each lane, which share what it has read (several questions side by side).
        question_tokens: of each, with its answer, where that can be more than a segment.
        backprop_context: segments of a context whose activations are kept for the gradients of its questions.
        backprop_segments: segments that a forward reads before the backward.
        max_tokens: how much is read of each document; None for all.
        dtype: of the base's weights and of activations.
        quantize: how bitsandbytes stores the base's linear layers.
        optimizer: "adamw" or "adafactor".
        sharding: "fsdp2" where processes divide weights, gradients and optimizer; None where each holds all.

    Raises:
        ValueError: the lanes do not divide into the micro-batches.
    """

    lanes: int
    segment_tokens: int
    accumulation: int = 1
    questions: int = 1
    question_tokens: int = 0
    backprop_context: int = 0
    backprop_segments: int = 1
    max_tokens: int | None = None
    dtype: torch.dtype = torch.bfloat16
    quantize: Literal["nf4", "int8"] | None = None
    optimizer: str = "adamw"
    activation_checkpointing: bool = False
    processes: int = 1
    sharding: Literal["fsdp2"] | None = None
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        if self.lanes % self.accumulation:
            raise ValueError(
                f"{self.lanes} lanes do not divide into {self.accumulation} micro-batches: choose lanes so that they "
                "do."
            )

    @property
    def shares(self) -> dict[str, float]:
        """The part of each label's bytes that one process holds, where processes divide them."""
        return dict.fromkeys(DIVIDED, 1 / self.processes) if self.sharding == "fsdp2" else {}


def estimate(base: PretrainedConfig, adapter: LoraConfig, work: Work) -> Estimate:
    """Estimate the memory of a training step. Loads no weights.

    Args:
        base: configuration of the base model.
        adapter: what is trained: a memory with LoRA, or LoRA alone.

    Raises:
        ValueError: an adapter that does not fit the base.
    """
    adapter = on_device(adapter, work.device_type)
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(base, dtype=work.dtype), adapter).train()
    with FakeTracker(work.shares) as tracker, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        materialize(model)
        tokens, moments = rehearse(tracker, model, adapter, work)
    extra = beside(model, work)
    for parts in moments.values():
        for label, size in extra.items():
            parts[label] = parts.get(label, 0) + size
    trained = sum(parameter.numel() for parameter in trained_parameters(model))
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    return Estimate(frozen, trained, tokens, moments, on_cpu=work.device_type == "cpu")


def on_device(adapter: LoraConfig, device_type: str) -> LoraConfig:
    """Return the adapter as it would be on a device: there it chooses how the memory is stored and searched."""
    adapter = copy.deepcopy(adapter)
    if hasattr(adapter, "search"):
        adapter.search = IN_TURN
    if getattr(adapter, "cache_dtype", "") is None and device_type != "cpu":
        adapter.cache_dtype = "bfloat16"  # type: ignore[attr-defined]  # Neurocache's
    return adapter


def materialize(model: nn.Module) -> None:
    """Replace a model's tensors on the meta device by tensors of the tracker that is active."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in made:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype)
                    made[tensor] = nn.Parameter(new, tensor.requires_grad) if held is module._parameters else new
                held[name] = None if tensor is None else made[tensor]  # type: ignore[assignment]  # parts may be None


def rehearse(
    tracker: Tracker, model: PeftModel, adapter: LoraConfig, work: Work
) -> tuple[int, dict[str, dict[str, int]]]:
    """Fill the memory and make one step under a tracker.

    Returns:
        Tokens that each row has read before the step, and by part of the step the bytes of its peak.
    """
    base: Any = model.get_base_model()
    options: Any = None
    if isinstance(adapter, MemoryAdapterConfig):
        options = adapter.resolve(base_shape(base.config))  # type: ignore[attr-defined]  # a memory adapter
    freeze_idle_gates(model, options)
    trained = trained_parameters(model)
    tracker.relabel((p for p in model.parameters() if not p.requires_grad), "weights")
    tracker.relabel(trained, "adapter")
    if work.quantize is not None:
        quantized(tracker, base, work.quantize)
    if work.activation_checkpointing:
        checkpoint_activations(base)
        base.disable_input_require_grads()
    optimizer = make_optimizer(model, Rates(1e-4, 1e-4, 1e-4), work.optimizer)
    for group in optimizer.param_groups:
        group["foreach"] = work.device_type != "cpu" and work.optimizer == "adamw"

    def give_gradients() -> None:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
            tracker.relabel([parameter.grad], "gradients")

    def read(tokens: int) -> Tensor:
        ids = torch.randint(3, base.config.vocab_size, (rows, tokens))
        output = model(input_ids=ids, past_key_values=batch.asked, use_cache=batch.asked is not None)
        return token_losses(output.logits, ids)

    give_gradients()
    tracker.label = "optimizer"
    optimizer.step()  # it now has its moments
    optimizer.zero_grad()
    tracker.label = "memory"
    rows = work.lanes // work.accumulation
    batch = Group(None, None if options is None else new_memory(model, rows))  # type: ignore[arg-type]  # no lanes are read
    segments = segments_before(options, work)
    through = min(work.backprop_context, segments)
    for left in reversed(range(through, segments)):
        with torch.set_grad_enabled(left == through):
            losses = read(work.segment_tokens)
    if segments > through:  # the last is read as a step does, which keeps less of a segment than mere reading
        losses.sum().backward()
        del losses
        optimizer.zero_grad()
    others = (work.accumulation - 1) * tracker.live["memory"]  # what the other micro-batches remember
    tokens = max(work.backprop_segments * work.segment_tokens, work.question_tokens)
    if work.question_tokens:
        if batch.memory is not None:
            tracker.label, batch.memory.keeps_graph = "activations", True
            for _ in range(through):
                read(work.segment_tokens)
            tracker.label, batch.memory.keeps_graph = "memory", False
            close_segments(find_decoder(base), batch.memory, range(rows))
        rows *= work.questions
        batch.ask(rows, work.question_tokens)
    if work.accumulation > 1:
        give_gradients()
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda p: tracker.relabel([p.grad], "gradients"))

    moments: dict[str, dict[str, int]] = {}

    def note(moment: str) -> None:
        held = {label: int(size * work.shares.get(label, 1)) for label, size in tracker.peak.items()}
        moments[moment] = {**held, "memory": held.get("memory", 0) + others}

    tracker.restart("activations")
    losses = read(tokens)
    note("forward")
    tracker.restart("activations")
    (losses.sum() + batch.own_loss()).backward()
    note("backward")
    del losses
    tracker.rename("activations", "memory")
    tracker.restart("working copies")
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    note("update")
    return segments * work.segment_tokens, moments


def segments_before(options: Any, work: Work) -> int:
    """Count the segments that fill a memory; one that grows with the text is full when the next step ends its document.

    Without `max_tokens` such a document is as long as the base's positions. Questions come after all of a context.
    """
    if options is None:
        return 0
    before, most = max(options.full_tokens // work.segment_tokens + 1, work.backprop_context), work.max_tokens
    if options.positions > options.base.max_positions:
        most = min(most or options.base.max_positions, options.base.max_positions)
    elif options.full_tokens >= EVERYTHING:
        most = most or options.base.max_positions
    if most is not None:
        asks = bool(work.question_tokens)
        own = math.ceil(most / work.segment_tokens) if asks else most // work.segment_tokens - work.backprop_segments
        before = min(before, own)
    return int(max(before, 0))


def quantized(tracker: Tracker, model: nn.Module, kind: str) -> None:
    """Make the frozen linear layers of the decoder work as bitsandbytes' do."""
    for layer in find_decoder(model).layers:  # type: ignore[union-attr]  # a list of modules
        for module in list(layer.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear) and not child.weight.requires_grad:
                    numbers, rows = child.weight.numel(), len(child.weight)
                    size = int(numbers * NF4_BYTES) if kind == "nf4" else numbers + 4 * rows
                    tracker.relabel([child.weight], "weights", size)
                    setattr(module, name, QuantizedLinear(child, keeps_input=kind == "int8"))


class QuantizedLinear(nn.Module):
    """A linear layer that works on a copy of its weight in the precision of the activations."""

    def __init__(self, linear: nn.Linear, keeps_input: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.keeps_input = linear.weight, linear.bias, keeps_input

    def forward(self, states: Tensor) -> Tensor:
        """Multiply as `nn.Linear` does."""
        product: Tensor = Product.apply(states, self.weight, self.keeps_input)  # type: ignore[no-untyped-call]  # torch's
        return product if self.bias is None else product + self.bias


class Product(torch.autograd.Function):
    """Multiply by a copy of a weight that is made anew for the backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, keeps_input: bool) -> Tensor:
        ctx.save_for_backward(weight, *([states] if keeps_input else []))
        return states @ weight.clone().T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.saved_tensors[0].clone(), None, None


def beside(model: PeftModel, work: Work) -> dict[str, int]:
    """Count what the step itself does not show: what work in several processes adds.

    DDP has a buffer for all gradients. FSDP2 gathers the layer at work and, meanwhile, the next one; parameters outside
    of the layers stay gathered.
    """
    extra = {}
    if work.processes > 1 and work.sharding is None:
        extra["gradients"] = sum(p.nbytes for p in trained_parameters(model))
    if work.sharding == "fsdp2":
        layers: Any = find_decoder(model.get_base_model()).layers
        sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
        outside = sum(p.nbytes for p in model.parameters()) - sum(sizes)
        extra["gathered layers"] = 2 * max(sizes) + outside
        extra["gradients"] = max(sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers)
    return extra
