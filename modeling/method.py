"""The descriptor of a memory method, the registry of all methods, and a method at work on one attention module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cacheformers.modeling.attending import AttentionInputs
from cacheformers.modeling.memory import MemoryState, SegmentCall

if TYPE_CHECKING:
    from cacheformers.modeling.cache import MemoryCache


@dataclass(frozen=True, kw_only=True)
class MemoryMethod:
    """Everything the rest of the package knows of one memory method.

    A method has `branch`, or `attend`, or neither where it only cuts text into segments.

    Attributes:
        adapter_config: PEFT config class of the method, a subclass of its settings.
        causal_lm: its language model class on a base. The `model_type` of its configuration is the method's name,
            which in upper case is its PEFT type.
        options: class of the settings resolved against one base model.
        new_state: given options, number of rows, the device of each augmented layer, dtype of the activations, whether
            training will encode anew what is stored, and `cache_size` (None: as configured; 0: remember nothing), an
            empty memory.
        parts: `NamedTuple` of what one layer trains, by name; None or absent is a part that it lacks. A property
            `fingerprint` may name other numbers to tell two memories apart than the first ones of each parameter.
        make_parts: given options, layer and the layer's own W_q, W_k, W_v, W_o (or None), new parts by name.
        branch: given options, layer, parts, the input of self-attention `[rows, time, h]`, the call and whether this is
            training, what is added to the output of self-attention, or None for nothing.
        attend: given options, layer, parts and `AttentionInputs`, what attention returns instead,
            `[rows, time, heads, d_head]`.
        title, paper, citation: its name, the address of its paper, and the paper's BibTeX entry.
        summary: one sentence; may name settings in braces.
        limits: what its users must know, a sentence each.
        grows, starts_as: for the table of methods: what grows with the text, and what an untrained adapter computes.
        stores: what it keeps of closed segments: up to `cache_size` "entries", a "matrix" of constant size,
            "everything" (all keys and values), or "nothing".
        rates: the learning rate of a part, by name: "gate" or "beta"; other parts have the memory's rate.
        frozen_layers: given options, layers whose parts no forward uses, which must not be trained.
        starts: by name, ways to start the memory from a model with an adapter and segments of text.
        statistics: given the active parts of each layer and the memories of a training step, numbers to log by name.
        former_names: under which older adapters and memory files know the method.
        test_settings: settings for tiny models of 3 layers and segments of 16 tokens, for the shared tests.
    """

    adapter_config: Any
    causal_lm: Any
    options: Any
    new_state: Callable[..., MemoryState]
    parts: Any
    make_parts: Callable[..., dict[str, nn.Module]]
    branch: Callable[..., Tensor | None] | None = None
    attend: Callable[..., Tensor] | None = None
    title: str
    summary: str
    stores: Literal["entries", "matrix", "everything", "nothing"]
    paper: str = ""
    citation: str = ""
    limits: tuple[str, ...] = ()
    grows: str = ""
    starts_as: str = ""
    rates: Mapping[str, str] = field(default_factory=dict)
    frozen_layers: Callable[[Any], tuple[int, ...]] = lambda options: ()
    starts: Mapping[str, Callable[..., None]] = field(default_factory=dict)
    statistics: Callable[[Sequence[Any], Sequence[MemoryCache]], dict[str, Any]] = lambda parts, memories: {}
    former_names: tuple[str, ...] = ()
    test_settings: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled model has the registered method, whose functions cannot be pickled.
        return method_named, (self.name,)

    @property
    def name(self) -> str:
        """The model type; in upper case the PEFT type."""
        model_type: str = self.config.model_type
        return model_type

    @property
    def config(self) -> Any:
        """Configuration class of its models."""
        return self.causal_lm.config_class

    @property
    def model(self) -> Any:
        """Its model class without a head."""
        return self.causal_lm.model_class

    def signature(self, options: Any) -> dict[str, Any]:
        """What two models must share to exchange a memory: every option that is not marked as free to differ."""
        values = asdict(options)
        return {
            "method": self.name,
            **{option.name: values[option.name] for option in fields(options) if not option.metadata.get("free")},
        }


METHODS: dict[str, MemoryMethod] = {}


def method_named(name: str) -> MemoryMethod:
    """The method of a model type or PEFT type, in either case; former names are known, too.

    Raises:
        KeyError: no such method is registered.
    """
    wanted = name.lower()
    found = (method for method in METHODS.values() if wanted == method.name or wanted in method.former_names)
    method = next(found, None)
    if method is None:
        raise KeyError(f"There is no memory method {name!r}; registered are {', '.join(METHODS)}.")
    return method


def is_method(name: str) -> bool:
    """Whether a model type or PEFT type is that of a memory method."""
    return any(name.lower() in (method.name, *method.former_names) for method in METHODS.values())


def method_of(options: Any) -> MemoryMethod:
    """The method that resolved options belong to."""
    return next(method for method in METHODS.values() if type(options) is method.options)


def first_numbers(*parameters: Tensor) -> tuple[float, ...]:
    """The first numbers of trained parameters; empty where they are sharded over processes (FSDP2)."""
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return ()
    return tuple(number for parameter in parameters for number in parameter.detach().flatten()[:4].tolist())


class PerHead(nn.Module):
    """One learned number per query head."""

    def __init__(self, heads: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((heads,), start))


class Share(PerHead):
    """One learned number per query head, whose sigmoid is the memory's share in what the head returns."""

    def shares(self) -> Tensor:
        """The memory's share in each head, `[heads]`."""
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
    """A method on one attention module, with the options and parts that are active there.

    Attributes:
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

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers by which two memories differ."""
        parts = self.active_parts
        if hasattr(parts, "fingerprint"):
            own: tuple[float, ...] = parts.fingerprint
            return own
        return first_numbers(*(parameter for part in parts if part is not None for parameter in part.parameters()))

    def branch(self, hidden: Tensor, call: SegmentCall) -> Tensor | None:
        """What the memory adds to the self-attention output, `[rows, time, h]`."""
        assert self.method.branch is not None
        return self.method.branch(self.options, self.layer, self.active_parts, hidden, call, self.training)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """What attention returns with the memory, `[rows, time, heads, d_head]`."""
        assert self.method.attend is not None
        return self.method.attend(self.options, self.layer, self.active_parts, inputs)
