"""The descriptor of a memory method, the registry of all methods, and a method on one attention module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import MemoryState


@dataclass(frozen=True, kw_only=True)
class MemoryMethod:
    """Everything that the rest of the package knows about one memory method.

    A method has `branch`, or `attend`, or neither if it only cuts text into segments or passes memory tokens on.

    Attributes:
        adapter_config: PEFT config class of the method, a subclass of its settings.
        causal_lm: its language model class on a base. The `model_type` of its configuration is the method's name,
            which in upper case is its PEFT type.
        options: class of the settings resolved against one base model.
        new_state: takes options, number of rows, the device of each augmented layer, dtype of the activations, whether
            training will encode stored states again, and `cache_size` (None: as configured; 0: remember nothing);
            returns an empty memory.
        parts: `NamedTuple` of what one layer trains, by name; a part that a layer lacks is None or absent. Its property
            `fingerprint`, if any, replaces the first numbers of each parameter in telling memories apart.
        make_parts: takes options, layer and the layer's W_q, W_k, W_v, W_o (or None); returns new parts by name.
        branch: takes options, layer, parts, the input of self-attention `[rows, time, h]`, the call and whether this is
            training; returns what is added to the output of self-attention, or None for nothing.
        memory_tokens: takes options, the parts of the lowest layer, and the `MemoryCache`; returns input embeddings of
            memory tokens that run through all layers for each row, `[rows, tokens, h]` (`MemoryState.memory_tokens`).
        enter: takes options, layer, parts, the input of a decoder layer `[rows, time, h]` and the call; returns what
            the layer takes instead.
        leave: takes options, layer, parts, the output of a decoder layer `[rows, time, h]` and the call.
        attend: takes options, layer, parts and `AttentionInputs`; returns what attention returns instead,
            `[rows, time, heads, d_head]`.
        title, paper, citation: its name, the address of its paper, and the paper's BibTeX entry.
        summary: one sentence; may contain settings in braces.
        limits: what its users must know, one sentence each.
        retrieves: what a token retrieves in each layer, in words; may contain settings in braces. Empty: nothing.
        choose_when, grows, starts_as: for the table of methods: whom it suits, what grows with the text, and what an
            untrained adapter computes.
        stores: what it keeps of closed segments: up to `cache_size` "entries", a "matrix" of constant size,
            "everything" (all keys and values), or "nothing".
        rates: the learning rate of a part, by name: "gate" or "beta"; other parts have the memory's rate.
        frozen_layers: takes options; returns layers whose parts no forward uses, so that they are not trained.
        starts: by name, ways to start the memory from a model with an adapter and segments of text.
        statistics: takes the active parts of each layer and the memories of a training step; returns numbers to log.
        former_names: the method's names in older adapters and memory files.
        test_settings: settings for the shared tests, with tiny models of 3 layers and segments of 16 tokens.
    """

    adapter_config: Any
    causal_lm: Any
    options: Any
    new_state: Callable[..., MemoryState]
    parts: Any
    make_parts: Callable[..., dict[str, nn.Module]]
    branch: Callable[..., Tensor | None] | None = None
    attend: Callable[..., Tensor] | None = None
    memory_tokens: Callable[..., Tensor] | None = None
    enter: Callable[..., Tensor] | None = None
    leave: Callable[..., None] | None = None
    title: str
    summary: str
    stores: Literal["entries", "matrix", "everything", "nothing"]
    paper: str = ""
    citation: str = ""
    limits: tuple[str, ...] = ()
    retrieves: str = ""
    choose_when: str = ""
    grows: str = ""
    starts_as: str = ""
    rates: Mapping[str, str] = field(default_factory=dict)
    frozen_layers: Callable[[Any], tuple[int, ...]] = lambda options: ()
    starts: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    statistics: Callable[[Sequence[Any], Sequence[MemoryCache]], dict[str, Any]] = lambda parts, memories: {}
    former_names: tuple[str, ...] = ()
    test_settings: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # Its functions cannot be pickled; a copied or unpickled model gets the registered method.
        return method_named, (self.name,)

    @property
    def name(self) -> str:
        """The model type; in upper case the PEFT type."""
        model_type: str = self.config.model_type
        return model_type

    @property
    def config(self) -> Any:
        """The configuration class of its models."""
        return self.causal_lm.config_class

    @property
    def model(self) -> Any:
        """Its model class without a head."""
        return self.causal_lm.model_class


METHODS: dict[str, MemoryMethod] = {}


def method_named(name: str) -> MemoryMethod:
    """Find a method by its name, a former name, or its PEFT type; raise KeyError if it is not registered."""
    wanted = name.lower()
    found = (method for method in METHODS.values() if wanted == method.name or wanted in method.former_names)
    method = next(found, None)
    if method is None:
        raise KeyError(f"There is no memory method {name!r}; registered are {', '.join(METHODS)}.")
    return method


def is_method(name: str) -> bool:
    """Whether `method_named` knows a model type or PEFT type."""
    return any(name.lower() in (method.name, *method.former_names) for method in METHODS.values())


def retrieving_methods() -> str:
    """Name the methods that retrieve, for messages."""
    *others, last = (method.title for method in METHODS.values() if method.retrieves)
    return f"{', '.join(others)} and {last}" if others else last


def method_of(options: Any) -> MemoryMethod:
    """Find the method that resolved options belong to."""
    return next(method for method in METHODS.values() if type(options) is method.options)


def first_numbers(*parameters: Tensor) -> tuple[float, ...]:
    """Return the first numbers of each parameter; nothing if they are sharded over processes (FSDP2)."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return ()
    return tuple(number for parameter in parameters for number in parameter.detach().flatten()[:4].tolist())


def normalize(norm: nn.LayerNorm, inputs: Tensor) -> Tensor:
    """Apply LayerNorm in float32 or better."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    weight, bias = norm.weight.to(dtype), norm.bias.to(dtype)
    return F.layer_norm(inputs.to(dtype), norm.normalized_shape, weight, bias, norm.eps)


class PerHead(nn.Module):
    """One learned number per query head."""

    def __init__(self, heads: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((heads,), start))


class Share(PerHead):
    """One learned number per query head, whose sigmoid is the memory's share in what the head returns."""

    def shares(self) -> Tensor:
        """Return the memory's share in each head, `[heads]`."""
        return torch.sigmoid(self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)))


def gathered(parameters: Iterable[Tensor]) -> Tensor:
    """Join the numbers of parameters in float32 on the CPU. Under FSDP2 every process must call this."""
    whole = (held.full_tensor() if isinstance(held, DTensor) else held for held in parameters)
    return torch.cat([held.detach().flatten() for held in whole]).float().cpu()


def tenths(numbers: Tensor) -> list[int]:
    """Count the numbers in each tenth from 0 to 1."""
    counts: list[int] = torch.histc(numbers, 10, 0.0, 1.0).int().tolist()
    return counts


def share_statistics(shares: Iterable[Share]) -> dict[str, Any]:
    """Summarize the memory's share in every head: mean, range, and the number in each tenth."""
    found = torch.sigmoid(gathered(share.weight for share in shares))
    return {
        "share_mean": float(found.mean()),
        "share_min": float(found.min()),
        "share_max": float(found.max()),
        "share_histogram": tenths(found),
    }


class MethodOnLayer:
    """The memory of one attention module, with the options and parts that are active there.

    Attributes:
        handles: of the hooks on the attention module.
        unread_forwards: training forwards so far that could not read the memory (see `inputs.watch_training`).
    """

    method: MemoryMethod
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
        """The trained parts of the active memory."""
        raise NotImplementedError

    def check_loaded(self) -> None:
        """Raise ValueError if the active memory lacks tensors, or has LoRA on its parts."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers by which two memories differ."""
        parts = self.active_parts
        if hasattr(parts, "fingerprint"):
            own: tuple[float, ...] = parts.fingerprint
            return own
        return first_numbers(*(parameter for part in parts if part is not None for parameter in part.parameters()))
