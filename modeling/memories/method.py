"""What a memory method consists of, and how it works on one attention module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cacheformers.modeling.memories.attending import AttentionInputs
from cacheformers.modeling.memories.base import SegmentCall


@dataclass(frozen=True)
class Method:
    """One memory method. It has `branch`, or `attend`, or neither where it only cuts text into segments.

    Attributes:
        options: class of its options on one base model.
        parts: `NamedTuple` of what one layer trains, with a `fingerprint`; None or absent is a part that it lacks.
        make_parts: given options, layer and the layer's own W_q, W_k, W_v, W_o (or None), new parts by name.
        branch: given options, layer, parts, the input of self-attention `[rows, time, h]`, the call and whether this is
            training, what is added to the output of self-attention, or None for nothing.
        attend: given options, layer, parts and `AttentionInputs`, what attention returns instead,
            `[rows, time, heads, d_head]`.
    """

    options: Callable[..., Any]
    parts: Any
    make_parts: Callable[..., dict[str, nn.Module]]
    branch: Callable[..., Tensor | None] | None = None
    attend: Callable[..., Tensor] | None = None


def first_numbers(*parameters: Tensor) -> tuple[float, ...]:
    """A few numbers of trained parameters; none where they are divided among processes (FSDP2)."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return ()
    return tuple(number for parameter in parameters for number in parameter.detach().flatten()[:4].tolist())


class Share(nn.Module):
    """One learned number per query head, whose sigmoid is the memory's share in what the head returns."""

    def __init__(self, heads: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((heads,), start))

    def shares(self) -> Tensor:
        """The memory's share in each head, `[heads]`."""
        return torch.sigmoid(self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)))


class MethodOnLayer:
    """What sits on an attention module: a method, and the options and parts that are active there.

    Attributes:
        unread_forwards: training forwards so far that could not read the memory (see `inputs.watch_training`).
    """

    method: Method
    layer: int
    training: bool
    handles: list[Any]
    unread_forwards = 0

    @property
    def options(self) -> Any:
        """Options of the active memory; None while none is active here."""
        raise NotImplementedError

    @property
    def active_parts(self) -> Any:
        """What is trained here."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers by which two memories differ."""
        found: tuple[float, ...] = self.active_parts.fingerprint
        return found

    def branch(self, hidden: Tensor, call: SegmentCall) -> Tensor | None:
        """What the memory adds to the self-attention output, `[rows, time, h]`."""
        assert self.method.branch is not None
        return self.method.branch(self.options, self.layer, self.active_parts, hidden, call, self.training)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """What attention returns with the memory, `[rows, time, heads, d_head]`."""
        assert self.method.attend is not None
        return self.method.attend(self.options, self.layer, self.active_parts, inputs)
