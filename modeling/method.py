"""What a memory method declares (settings, options, the descriptor), the registry, and a method on a base model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cacheformers.modeling.architectures import attention_modules
from cacheformers.modeling.cache import MemoryCache
from cacheformers.modeling.memory import EVERYTHING, BaseShape, LocalWindow, MemoryState
from cacheformers.modeling.offloading import keep_in_memory
from cacheformers.modeling.search.store import Ring

STORE_DTYPES = (None, "float32", "float64", "bfloat16", "float16")


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
            returns an empty memory. It is the state's class itself where attention does not see the memory.
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
        whole: class of the options of its models without a base; None if there are no such models.
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
    whole: Any = None
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
    def attends(self) -> bool:
        """Whether attention sees its memories (`MemoryState.attends`)."""
        return getattr(self.new_state, "attends", True)

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
    return next(method for method in METHODS.values() if type(options) in (method.options, method.whole))


def options_named(name: str) -> Any:
    """Find the class of the options that files know by a name (`MethodOptions.kind`); raise KeyError if unknown."""
    wholes = (method.whole for method in METHODS.values() if method.whole is not None)
    return next((options for options in wholes if options.kind == name), None) or method_named(name).options


def setting(default: Any, help: str, free: bool = False) -> Any:
    """Declare a field of a settings class, with its help text.

    Args:
        free: models that exchange a memory may differ in it.
    """
    return field(default=default, metadata={"help": help, "free": free})


class MethodSettings:
    """Base of the settings classes, which become part of a method's adapter config and configuration."""

    def resolve(self, base: BaseShape) -> Any:
        """Resolve the settings against one base model; raise ValueError if they do not fit it or each other."""
        registered = METHODS.values()
        method = next((known for known in registered if isinstance(self, (known.adapter_config, known.config))), None)
        if method is None:
            raise ValueError(
                f"{type(self).__name__} is not of a registered method: call cacheformers.register(MemoryMethod(...)) "
                "with it first."
            )
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(self) if "free" in entry.metadata}  # type: ignore[arg-type]  # a dataclass, as all subclasses are
        return method.options(base=base, **chosen)


@dataclass(repr=False)  # transformers prints a configuration
class LocalWindowSettings(MethodSettings):
    """Settings of a method with a local window."""

    segment_tokens: int = setting(1024, "Tokens after which a segment enters the memory (n).")
    local_window: str = setting(
        "segment",
        "'segment': self-attention sees only the open segment (paper). 'sliding': also the last "
        "window_tokens tokens before it, with moved rotary positions; use sink_tokens with it on a pretrained base.",
    )
    window_tokens: int | None = setting(None, "Tokens that a sliding window keeps (W). Default: segment_tokens.")
    sink_tokens: int = setting(
        0,
        "First tokens of a document, whose keys and values every segment sees. Pretrained models "
        "rely on them (attention sinks): without any, a sliding window ruins such a model; 4 are enough.",
    )


@dataclass(repr=False)
class StoreSettings:
    """Settings of a method that stores entries."""

    cache_dtype: str | None = setting(
        None, "Precision of what is stored. Default: float32 on the CPU, bfloat16 on a GPU.", free=True
    )


@dataclass(repr=False)
class SearchSettings(StoreSettings):
    """Settings of a method that searches what it stores."""

    search: str = setting("auto", "'auto', 'exact', 'faiss', or 'faiss:' and a faiss index factory string.", free=True)


class StoreOptions:
    """Options of a method that stores entries."""

    cache_dtype: str | None

    def new_ring(
        self,
        rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
        value_width: int | None = None,
    ) -> Ring:
        """Create an empty store of one layer, see `Ring`; `dtype` is that of the activations."""
        return Ring(rows, capacity, width, value_width, self.store_dtype(device, dtype), device)

    def store_dtype(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return `cache_dtype`; by default float64 for a float64 model, bfloat16 on a GPU, float32 on the CPU."""
        if self.cache_dtype is not None:
            return getattr(torch, self.cache_dtype)
        if dtype == torch.float64:
            return dtype
        return torch.float32 if device.type == "cpu" else torch.bfloat16


@dataclass(kw_only=True)
class MethodOptions:
    """Settings resolved against one base model. A method's options class inherits from its settings and this.

    It also has, as fields or properties:
        window: the local window.
        layers: layers with a memory.
        entry_numbers: the numbers that one token's entries take in all layers that store, in a method with entries.
        near_tokens: the longest text that does not read the memory, in tokens; None where training needs no reading.
    """

    base: BaseShape

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose output the method changes, and which get LoRA by default."""
        layers: tuple[int, ...] = self.layers  # type: ignore[attr-defined]  # a field in some methods
        return layers

    @property
    def method(self) -> MemoryMethod:
        """The method that these options belong to."""
        return method_of(self)

    @property
    def retrieves(self) -> str:
        """What a token retrieves in each layer, in words; empty if nothing."""
        return self.method.retrieves.format(**vars(self))

    @property
    def positions(self) -> int:
        """Positions that the base model must have to read a text of any length."""
        window: LocalWindow = self.window  # type: ignore[attr-defined]  # of each method
        return window.positions

    @property
    def full_tokens(self) -> int:
        """Tokens of a text after which the memory takes no more bytes; `EVERYTHING` if it grows with the text."""
        window: LocalWindow = self.window  # type: ignore[attr-defined]  # of each method
        return EVERYTHING if window.unbounded else getattr(self, "cache_size", 0)

    @property
    def kind(self) -> str:
        """The name by which files tell what has read: the method's; models without a base have another."""
        return self.method.name

    @property
    def signature(self) -> dict[str, Any]:
        """The options that two models must share to exchange a memory: all that are not marked as free to differ."""
        values = asdict(self)
        shared = {option.name: values[option.name] for option in fields(self) if not option.metadata.get("free")}
        return {"method": self.kind, **shared}

    def new_state(
        self,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool = False,
        cache_size: int | None = None,
    ) -> MemoryState:
        """Create an empty memory, see `MemoryMethod.new_state`; only one of entries can be given a size."""
        if cache_size and self.method.stores != "entries":
            raise ValueError(
                f"{self.method.title} stores no entries to count: leave cache_size out, or give 0 for no memory."
            )
        state = self.method.new_state(self, rows, devices, dtype, keep_values, cache_size)
        state.off = cache_size == 0
        return state


@dataclass(kw_only=True)
class LocalWindowOptions(MethodOptions, LocalWindowSettings):
    """The local window, resolved against a base model."""

    def __post_init__(self) -> None:
        check_layers(self.layers, self.base)  # type: ignore[attr-defined]  # a field in some methods
        self.check_local_window()

    def check_local_window(self) -> None:
        """Fill in the default of `window_tokens`; raise ValueError if an option does not fit the base model."""
        if self.window_tokens is None:
            self.window_tokens = self.segment_tokens
        check_at_least(1, self, "segment_tokens")
        check_at_least(0, self, "window_tokens", "sink_tokens")
        check_choices(self, local_window=("segment", "sliding"))
        window, base = self.window, self.base
        if self.local_window == "sliding" and not base.rotary:
            raise ValueError(
                f"local_window='sliding' moves keys to new positions, which {base.model_type} cannot do (its positions "
                "are learned embeddings): use local_window='segment'."
            )
        if window.positions > base.max_positions:
            raise ValueError(
                f"segment_tokens {window.segment_tokens} + window_tokens {window.kept_tokens} + sink_tokens "
                f"{window.sink_tokens}{f' + memory tokens {window.memory_tokens}' if window.memory_tokens else ''} = "
                f"{window.positions} positions, but this base model has {base.max_positions}. "
                "Choose a smaller segment_tokens."
            )

    @property
    def window(self) -> LocalWindow:
        """The tokens that self-attention sees besides the open segment."""
        kept = self.window_tokens if self.local_window == "sliding" else 0
        return LocalWindow(self.segment_tokens, kept or 0, self.sink_tokens)

    @property
    def near_tokens(self) -> int | None:
        """The longest text that does not read the memory, in tokens: the first segment."""
        return self.segment_tokens


def chosen_layers(layers: Sequence[int] | None, base: BaseShape) -> tuple[int, ...]:
    """Sort and check layers; None means all layers of the base model."""
    if layers is None:
        return tuple(range(base.layers))
    if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers must be a list of whole numbers such as [0, 1], got {layers!r}.")
    check_layers(layers, base)
    return tuple(sorted(layers))


def check_layers(layers: Iterable[int], base: BaseShape) -> None:
    """Raise ValueError unless layers names at least one layer of the base model, and none twice."""
    layers = list(layers)
    wrong = sorted({layer for layer in layers if not 0 <= layer < base.layers})
    if wrong:
        raise ValueError(f"Layers {wrong} do not exist: this base model has layers 0 to {base.layers - 1}.")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"layers must name at least one layer, and each once, got {layers}.")


def check_choices(options: Any, **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError if an option is not among the values allowed for it."""
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ValueError(f"{name} must be one of {values}, got {getattr(options, name)!r}.")


def check_at_least(least: int, options: Any, *names: str) -> None:
    """Raise ValueError if one of the named options is less than `least`."""
    for name in names:
        if getattr(options, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(options, name)}.")


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


def active_memories(decoder: nn.Module) -> list[MethodOnLayer]:
    """Return the memories of the active adapter, lowest layer first."""
    memories: list[Any] = [attention._modules.get("memory") for attention in attention_modules(decoder)]
    return [memory for memory in memories if memory is not None and memory.options is not None]


def lowest_memory(decoder: nn.Module) -> MethodOnLayer | None:
    """Return the lowest layer's active memory, if any; raise ValueError if weights of a memory are not all there."""
    memories = active_memories(decoder)
    for memory in memories:
        memory.check_loaded()
        keep_in_memory(memory)  # type: ignore[arg-type]  # a module, too
    return memories[0] if memories else None


def active_options(decoder: nn.Module) -> Any:
    """Return the options of the active memory adapter, if any; raise ValueError if its weights are not all there."""
    lowest = lowest_memory(decoder)
    return None if lowest is None else lowest.options


def required_options(decoder: nn.Module) -> Any:
    """Return the options of the active memory adapter; raise ValueError if there is none."""
    options = active_options(decoder)
    if options is None:
        raise ValueError("No memory adapter is active on this model: enable it, or set it with set_adapter().")
    return options
