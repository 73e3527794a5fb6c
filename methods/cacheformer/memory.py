"""CacheFormer's attention on the layers of a pretrained model, with the layers' own projections.

    near    the own and the whole previous window of w tokens, attended to as the base does
    far     compressed segments, shifted ones, and retrieved tokens (`cacheformer.py`), wholly before that window

So whatever is no longer than two windows is the base's own attention. Keys are compressed as they were before their
rotation, then rotated to the middle of their segment; values carry no rotation. What is compressed is not normed unless
`global_norm` asks for it: it stands in one softmax with the base's keys, so it must have their scale.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from cacheformers.methods.cacheformer.attention import attend as attend_documents
from cacheformers.methods.cacheformer.cacheformer import (
    CacheFormerOptions,
    CacheFormerParts,
    CacheFormerSettings,
    Projected,
    make_parts,
)
from cacheformers.methods.cacheformer.state import CacheFormerState
from cacheformers.modeling.attention import AttentionInputs, unrotated
from cacheformers.modeling.memory import EVERYTHING, BaseShape, LocalWindow, MemoryState, SegmentCall
from cacheformers.modeling.settings import (
    MethodOptions,
    MethodSettings,
    check_at_least,
    check_layers,
    chosen_layers,
    setting,
)


@dataclass(repr=False)  # transformers prints a configuration
class CacheFormerOnBaseSettings(CacheFormerSettings, MethodSettings):
    """Fields of `CacheFormerAdapterConfig` and `CacheFormerOnBaseConfig`. Layers count from 0."""

    layers: list[int] | None = setting(None, "Layers that attend so; the others see everything. Default: all.")
    global_norm: bool = setting(
        False, "LayerNorm on compressed keys and values, as in the paper's models from scratch."
    )
    segment_tokens: int = setting(
        2048, "Tokens that one forward takes; it bounds activations, and changes no result.", free=True
    )

    def resolve(self, base: BaseShape) -> CacheFormerOnBaseOptions:
        """The method's options for one base model.

        Raises:
            ValueError: options that contradict each other, or do not fit the base model.
        """
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(CacheFormerOnBaseSettings)}
        return CacheFormerOnBaseOptions(
            heads=base.heads, kv_heads=base.kv_heads, head_dim=base.head_dim, base=base, **chosen
        )


@dataclass(kw_only=True)
class CacheFormerOnBaseOptions(CacheFormerOptions, CacheFormerOnBaseSettings, MethodOptions):
    """`CacheFormerOnBaseSettings` resolved against a base model.

    Raises:
        ValueError: options that contradict each other, or do not fit the base model.
    """

    layers: tuple[int, ...]  # type: ignore[assignment]  # resolved
    tied: bool = False
    local_norm: bool = False
    global_norm: bool = False
    pretrained: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = chosen_layers(self.layers, self.base)
        check_layers(self.layers, self.base)
        check_at_least(1, self, "segment_tokens")
        own = self.base.sliding_window
        if own is not None and self.window_tokens > own:
            raise ValueError(
                f"window_tokens {self.window_tokens} is more than the {own} tokens that this base's layers see: choose "
                f"window_tokens <= {own}."
            )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose output the method changes."""
        return self.layers

    @property
    def near_tokens(self) -> int:
        """Texts of up to two windows are attended to in full."""
        return 2 * self.window_tokens

    @property
    def window(self) -> LocalWindow:
        """What stays visible: everything. (Near and far are the attention's own matter.)"""
        return LocalWindow(self.segment_tokens if self.causal else EVERYTHING, EVERYTHING)


def make_layer_parts(options: CacheFormerOnBaseOptions, *_: Any) -> dict[str, nn.Module]:
    """What a layer trains. Nothing of it is used until a text is longer than two windows."""
    return make_parts(options)


# Attention


def attend(
    options: CacheFormerOnBaseOptions, layer: int, parts: CacheFormerParts, projected: Projected, call: SegmentCall
) -> Tensor:
    """CacheFormer's attention of new columns, `[rows, time, heads, d]`.

    Raises:
        ValueError: `paper_block` with padding, or after a text that was read before.
    """
    if not options.causal:
        if call.visible.shape[1] > call.real.shape[1]:
            raise ValueError(
                "selection='paper_block' chooses with tokens that do not exist while decoding: it cannot generate or "
                "go on from a memory. Pass whole documents in one forward, or use selection='previous_block'."
            )
        if call.padded:
            raise ValueError("selection='paper_block' is for study and takes no padding: pass documents one by one.")
        return attend_documents(options, parts, projected, call.rotate).transpose(1, 2)
    reading: CacheFormerReading = call.reading
    state = reading.before[layer].successor()
    read = state.attend(parts, projected, call.rotate, call.real)
    reading.after[layer] = state
    return read.transpose(1, 2)


def attend_inputs(
    options: CacheFormerOnBaseOptions, layer: int, parts: CacheFormerParts, inputs: AttentionInputs
) -> Tensor:
    """`attend`, given what the attention module computes."""
    projected = Projected(
        inputs.query,
        inputs.new_key,
        inputs.new_value,
        None if parts.gate is None else inputs.plain_query,
        turned_back(inputs.new_key, inputs.rotation),
        inputs.scaling,
    )
    return attend(options, layer, parts, projected, inputs.call)


def turned_back(keys: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Keys as they would be at position 0; whatever factor the model scales its rotation by stays in them."""
    if rotation is None:
        return keys
    exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
    cos, sin = (side.to(exact.dtype) for side in rotation)
    factor = (cos.square() + sin.square()).sqrt()
    return unrotated(exact, cos / factor, sin / factor).to(keys.dtype)


@dataclass
class CacheFormerReading:
    """What one forward reads, and leaves behind: every layer's state before and after it."""

    before: dict[int, CacheFormerState]
    after: dict[int, CacheFormerState] = field(default_factory=dict)


class CacheFormerMemory(MemoryState):
    """A state for every layer with the method. Rows stand flush left in it, whatever columns they have elsewhere."""

    can_crop = False  # whom the last tokens chose for is not undone

    def __init__(
        self, options: CacheFormerOnBaseOptions, rows: int, devices: dict[int, torch.device], dtype: torch.dtype
    ) -> None:
        self.own_layers = frozenset(options.layers)
        layers = options.layers if options.causal else ()  # the others are for whole documents, and keep nothing
        self.layers = {layer: CacheFormerState(options, rows, dtype, devices[layer]) for layer in layers}

    def begin(self) -> CacheFormerReading:
        return CacheFormerReading(self.layers)

    def end(self, reading: CacheFormerReading) -> None:
        self.layers = {**self.layers, **reading.after}

    def check(self, row: int, columns: Tensor) -> None:
        """Nothing is stored that is not read already."""

    def commit(self, row: int, columns: Tensor) -> None:
        """Segments of a forward mean nothing to the method."""

    def detach(self) -> None:
        """Cut the graph: the next step's gradient does not reach what this one read."""
        for state in self.layers.values():
            state.detach()

    def keep(self, columns: Tensor) -> None:
        """There are no columns."""

    def reset(self, rows: Sequence[int]) -> None:
        for state in self.layers.values():
            state.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        for state in self.layers.values():
            state.select(rows)

    def clone(self) -> CacheFormerMemory:
        twin = copy.copy(self)
        twin.layers = {layer: state.clone() for layer, state in self.layers.items()}
        return twin

    def to(self, device: torch.device | str) -> None:
        for state in self.layers.values():
            state.to(device)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.layers.values())

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{name}": tensor
            for layer, state in self.layers.items()
            for name, tensor in state.state_dict().items()
        }

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, state in self.layers.items():
            prefix = f"{layer}."
            state.load_state_dict(
                {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            )


def new_state(
    options: CacheFormerOnBaseOptions,
    rows: int,
    devices: dict[int, torch.device],
    dtype: torch.dtype,
    keep_values: bool = False,
    cache_size: int | None = None,
) -> CacheFormerMemory:
    """An empty memory.

    Args:
        devices: of each layer with the method.
        dtype: of the model's activations.
        keep_values: nothing is encoded anew in training, so this changes nothing.
        cache_size: 0 for one that sees the windows alone.

    Raises:
        ValueError: another cache_size was asked for.
    """
    if cache_size:
        raise ValueError("CacheFormer keeps every key and value: leave cache_size out, or 0 for windows alone.")
    kept = options if cache_size is None else replace(options, long=False, overlap=False, cache=False)
    return CacheFormerMemory(kept, rows, devices, dtype)
