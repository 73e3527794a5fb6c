"""CacheFormer's attention on the layers of a pretrained model, with the layers' own projections.

    near    the token's window and the whole previous window, w tokens each, attended to as the base does
    far     compressed segments, shifted ones, and retrieved tokens (`cacheformer.py`), wholly before those windows

With other `representatives` than compressed vectors nothing is compressed and nothing has to be trained
(`representatives.py`), and `far_distance` keeps retrieved tokens inside the positions that the base has learned.

A text of up to two windows therefore gets the base's own attention. Keys are compressed before their rotation, then
rotated to the middle of their segment; values carry no rotation. Compressed vectors share a softmax with the base's
keys, so they are not normed, which would change their scale, unless `global_norm` asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
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
from cacheformers.methods.cacheformer.representatives import REPRESENTATIVES, asking
from cacheformers.methods.cacheformer.state import CacheFormerState
from cacheformers.methods.cacheformer.supervision import looking_queries, retrieval_loss
from cacheformers.modeling.architectures import check_scores
from cacheformers.modeling.attention import AttentionInputs
from cacheformers.modeling.inputs import refuse_looking_ahead
from cacheformers.modeling.memory import (
    EVERYTHING,
    BaseShape,
    LocalWindow,
    SegmentCall,
    joined,
    part,
    refuse_not_finite,
)
from cacheformers.modeling.method import (
    MethodOptions,
    MethodSettings,
    check_at_least,
    check_choices,
    chosen_layers,
    setting,
)
from cacheformers.modeling.rotary import turned_back
from cacheformers.modeling.supervision import Supervised, Supervision


@dataclass(repr=False)  # transformers prints a configuration
class CacheFormerOnBaseSettings(CacheFormerSettings, MethodSettings):
    """Fields of `CacheFormerAdapterConfig` and `CacheFormerOnBaseConfig`. Layers count from 0."""

    layers: list[int] | None = setting(None, "Layers with this attention; the others see everything. Default: all.")
    global_norm: bool = setting(
        False, "LayerNorm on compressed keys and values, as in the paper's models from scratch."
    )
    representatives: str = setting(
        "compressed",
        "What segments are scored by. 'compressed': their compressed vectors. The others train nothing, take queries "
        "and keys before rotation, and need long=False and overlap=False. 'mean': the mean of a segment's keys; "
        "'tokens': its pool_vectors strongest keys, as in InfLLM; 'bounds': the largest and smallest number of each "
        "channel, as in Quest.",
    )
    far_distance: int = setting(
        0,
        "Retrieved segments further than this before the window are read as if they began there, so that a base reads "
        "texts beyond its positions. 0: at their true distance.",
        free=True,
    )
    packed: bool = setting(
        False,
        "Read retrieved segments side by side, in their order, as if they stood just before the window; also for texts "
        "beyond the base's positions.",
        free=True,
    )
    reading_retrieves: bool = setting(
        True,
        "Retrieve while read() reads a text, too. False: only what follows the text, questions and answers, retrieves; "
        "of the text a token sees its windows, and the first segment with `sink`. Reading is then faster.",
        free=True,
    )
    cache_layers: list[int] | None = setting(
        None,
        "Layers whose cache retrieves; the others see their windows, and compressed segments where those are on, and "
        "keep no tokens. Default: all of `layers`.",
    )
    retrieval_weight: float = setting(
        0.0,
        "Beyond the paper, with representatives: above 0 the queries that choose segments get a trained part, and this "
        "is the weight, in `memory.state.loss`, of a contrastive loss by which questions learn to find the segments "
        "that hold their answers, where training data say which.",
        free=True,
    )
    segment_tokens: int = setting(2048, "Tokens of one forward; bounds activations and changes no result.", free=True)

    def resolve(self, base: BaseShape) -> CacheFormerOnBaseOptions:
        chosen = {entry.name: getattr(self, entry.name) for entry in fields(CacheFormerOnBaseSettings)}
        return CacheFormerOnBaseOptions(
            heads=base.heads, kv_heads=base.kv_heads, head_dim=base.head_dim, base=base, **chosen
        )


@dataclass(kw_only=True)
class CacheFormerOnBaseOptions(CacheFormerOptions, CacheFormerOnBaseSettings, MethodOptions):
    """`CacheFormerOnBaseSettings` resolved against a base model; ValueError if an option does not fit it."""

    layers: tuple[int, ...]  # type: ignore[assignment]  # resolved
    cache_layers: tuple[int, ...]  # type: ignore[assignment]  # resolved
    tied: bool = False
    local_norm: bool = False
    global_norm: bool = False
    pretrained: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = chosen_layers(self.layers, self.base)
        self.cache_layers = self.layers if self.cache_layers is None else chosen_layers(self.cache_layers, self.base)
        if not set(self.cache_layers) <= set(self.layers):
            raise ValueError(
                f"cache_layers {list(self.cache_layers)} names layers that have other attention: layers is "
                f"{list(self.layers)}."
            )
        check_at_least(1, self, "segment_tokens")
        check_at_least(0, self, "far_distance", "retrieval_weight")
        check_choices(self, representatives=("compressed", *REPRESENTATIVES))
        if self.retrieval_weight and self.representatives == "compressed":
            raise ValueError(
                "retrieval_weight trains queries that choose segments, which with representatives='compressed' are "
                f"those of attention itself: choose one of {', '.join(REPRESENTATIVES)}, or leave it out."
            )
        if self.retrieval_weight and self.selection == "paper_block":
            raise ValueError(
                "selection='paper_block' keeps no memory that a question could ask: leave retrieval_weight out."
            )
        if self.representatives != "compressed" and (self.long or self.overlap):
            raise ValueError(
                f"representatives={self.representatives!r} shows no compressed segments, only retrieved tokens: set "
                "long=False and overlap=False."
            )
        if self.representatives == "tokens" and self.pool_vectors > self.pool_tokens:
            raise ValueError(
                f"A segment of pool_tokens {self.pool_tokens} cannot be represented by {self.pool_vectors} of its "
                "tokens: choose pool_vectors <= pool_tokens."
            )
        if self.moves:
            self.check_moves()
        check_scores(self.base.model_type)
        own = self.base.sliding_window
        if own is not None and self.window_tokens > own:
            raise ValueError(
                f"window_tokens {self.window_tokens} is more than the {own} tokens that this base's layers see: choose "
                f"window_tokens <= {own}."
            )

    def of_layer(self, layer: int) -> CacheFormerOnBaseOptions:
        """The options of one layer: without a cache unless it is one of `cache_layers`."""
        return self if layer in self.cache_layers else self.without_cache

    @cached_property
    def without_cache(self) -> CacheFormerOnBaseOptions:
        return replace(self, cache=False, representatives="compressed", retrieval_weight=0.0)

    @property
    def moves(self) -> str:
        """The option that moves retrieved tokens to other positions; empty if there is none."""
        return "packed" if self.packed else "far_distance" if self.far_distance else ""

    @property
    def reach(self) -> int:
        """How many tokens before the window moved tokens are read."""
        return self.retrieved * self.pool_tokens if self.packed else self.far_distance

    def check_moves(self) -> None:
        """Raise ValueError unless retrieved tokens can be moved, and stay before the window and in known positions."""
        if self.packed and self.far_distance:
            raise ValueError("packed and far_distance both say where retrieved tokens are read: choose one.")
        if not self.base.rotary:
            raise ValueError(
                f"{self.moves} moves keys to other positions, which {self.base.model_type} cannot do (its positions "
                "are learned embeddings): leave it out."
            )
        if self.long or self.overlap:
            raise ValueError(f"{self.moves} moves retrieved tokens alone: set long=False and overlap=False.")
        most = self.base.max_positions - 2 * self.window_tokens
        if self.packed and self.reach > most:
            raise ValueError(
                f"{self.retrieved} segments of pool_tokens {self.pool_tokens} take {self.reach} positions in a row, "
                f"and with two windows must fit the base's {self.base.max_positions}: at most {most}."
            )
        if not self.packed and not self.pool_tokens <= self.far_distance <= most:
            raise ValueError(
                f"far_distance {self.far_distance} must be at least pool_tokens {self.pool_tokens}, and with two "
                f"windows fit the base's {self.base.max_positions} positions: at most {most}."
            )

    @property
    def positions(self) -> int:
        """Positions that the base model must have."""
        bounded = self.moves and len(self.layers) == self.base.layers  # the other layers see everything
        return 2 * self.window_tokens + self.reach if bounded else EVERYTHING

    @property
    def full_tokens(self) -> int:
        """The budget and the windows, if every layer retrieves within a budget, or sees windows alone."""
        bounded = self.most_tokens if self.cache else self.most_window_tokens
        if bounded is None or self.long or self.overlap or len(self.layers) < self.base.layers:
            return EVERYTHING
        return bounded

    @property
    def near_tokens(self) -> int:
        """Two windows: shorter texts are attended to in full."""
        return 2 * self.window_tokens

    @property
    def window(self) -> LocalWindow:
        """Everything stays visible; the attention itself tells near from far."""
        return LocalWindow(self.segment_tokens if self.causal else EVERYTHING, EVERYTHING)


@dataclass(kw_only=True)
class CacheFormerModelOptions(CacheFormerOptions, MethodOptions):
    """The options of a CacheFormer from scratch, whose every layer has this attention.

    Attributes:
        segment_tokens: tokens of a row in training; a longer text is read in pieces of so many.
    """

    kind = "cacheformer_from_scratch"  # adapters of earlier releases are called cacheformer

    segment_tokens: int = setting(1024, "Tokens of a row in training, and of one forward.", free=True)
    rope_theta: float = 10000.0

    def of_layer(self, layer: int) -> CacheFormerModelOptions:
        """The options of one layer: the same for all."""
        return self

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.base.layers))

    @property
    def window(self) -> LocalWindow:
        """Everything stays visible; the attention itself tells near from far."""
        return LocalWindow(self.segment_tokens, EVERYTHING)


def make_layer_parts(options: CacheFormerOnBaseOptions, layer: int, *_: Any) -> dict[str, nn.Module]:
    """Make the parts of one layer."""
    own, base = options.of_layer(layer), options.base
    parts = make_parts(own)
    if own.retrieval_weight:
        query = nn.Linear(base.hidden_size, base.heads * base.head_dim, bias=False)
        nn.init.zeros_(query.weight)
        parts["query"] = query
    return parts


def attend(
    options: CacheFormerOnBaseOptions, layer: int, parts: CacheFormerParts, projected: Projected, call: SegmentCall
) -> Tensor:
    """Compute CacheFormer's attention of new columns, `[rows, time, heads, d]`.

    Raises:
        ValueError: `paper_block` with padding, or after earlier text.
    """
    turn = call.rotate
    rotate = None if turn is None else lambda keys, positions: turn(keys, positions, layer)
    if not options.causal:
        if call.visible.shape[1] > call.real.shape[1]:
            refuse_looking_ahead(options)
        if call.padded:
            raise ValueError("selection='paper_block' is for study and takes no padding: pass documents one by one.")
        return attend_documents(options.of_layer(layer), parts, projected, rotate).transpose(1, 2)
    reading: CacheFormerReading = call.reading
    state = reading.before[layer].successor()
    read = state.attend(parts, projected, rotate, call.real, reading.by_windows)
    reading.after[layer] = state
    return read.transpose(1, 2)


def attend_inputs(
    options: CacheFormerOnBaseOptions, layer: int, parts: CacheFormerParts, inputs: AttentionInputs
) -> Tensor:
    """Call `attend` with what the attention module computes."""
    if layer == options.layers[-1] and not torch.is_grad_enabled():  # in training the loss shows NaN
        states = torch.cat([inputs.new_key, inputs.new_value], -1).transpose(1, 2).flatten(2)
        refuse_not_finite(states, inputs.call.real)
    own = options.of_layer(layer)
    scaling: float = inputs.module.scaling  # type: ignore[assignment]  # a number
    looking = None if parts.query is None else looking_queries(parts.query, inputs)
    projected = Projected(
        inputs.query,
        inputs.new_key,
        inputs.new_value,
        inputs.plain_query if parts.gate is not None or own.representatives != "compressed" else None,
        turned_back(inputs.new_key, inputs.inverse),
        inputs.scaling,
        scaling,
        looking,
    )
    read = attend(options, layer, parts, projected, inputs.call)
    if looking is not None and inputs.module.training and torch.is_grad_enabled():
        reading: CacheFormerReading = inputs.call.reading
        queries = asking(options.representatives, looking) * scaling
        reading.losses[layer] = retrieval_loss(
            queries, reading.before[layer].tokens_read, reading.after[layer], reading.gold, inputs.call.start
        )
    return read


@dataclass
class CacheFormerReading(Supervision):
    """The states before and after one forward, by layer, and whether it is of a text that is read without retrieval."""

    before: dict[int, CacheFormerState]
    by_windows: bool = False
    after: dict[int, CacheFormerState] = field(default_factory=dict)


class CacheFormerMemory(Supervised):
    """A state for every layer with the method, which counts each row's tokens, not columns.

    `MemoryMethod.new_state` has the arguments. With cache_size 0 it only sees windows.
    """

    can_crop = False  # the choices of the last tokens cannot be undone

    def __init__(
        self,
        options: CacheFormerOnBaseOptions | CacheFormerModelOptions,
        rows: int,
        devices: dict[int, torch.device],
        dtype: torch.dtype,
        keep_values: bool,
        cache_size: int | None,
    ) -> None:
        if cache_size == 0:
            options = replace(options, long=False, overlap=False, cache=False)
        self.options, self.retrieval_weight = options, options.retrieval_weight
        self.own_layers, self.retrieved_tokens = frozenset(options.layers), options.pool_tokens
        self.retrieves = options.cache and options.causal
        layers = options.layers if options.causal else ()  # `paper_block` takes whole documents and keeps nothing
        self.layers = {
            layer: CacheFormerState(options.of_layer(layer), rows, dtype, devices[layer]) for layer in layers
        }

    def begin(self) -> CacheFormerReading:
        by_windows = self.reading and not self.options.reading_retrieves
        for state in self.layers.values():
            state.expected_tokens = self.expected_tokens
        return CacheFormerReading(self.layers, by_windows, gold=self.gold)

    def end(self, reading: CacheFormerReading) -> None:
        self.layers = {**self.layers, **reading.after}
        self.take_losses(reading)

    def kept(self, row: int, closed: int) -> int:
        options = self.options
        if not self.layers or options.long or options.overlap:  # compressed vectors of all tokens are read
            return closed
        read = next(iter(self.layers.values())).tokens_read[row]
        gone = int(options.left(torch.tensor(read)))
        return closed - (gone + options.sinks) * options.pool_tokens if gone else closed

    def retrieved(self) -> dict[int, Tensor]:
        return {
            layer: torch.where(state.taken < 0, -1, state.taken * self.retrieved_tokens)
            for layer, state in self.layers.items()
            if state.taken is not None
        }

    def detach(self) -> None:
        """Cut the autograd graph, so that no gradient of the next step reaches what this one read."""
        super().detach()
        for state in self.layers.values():
            state.detach()

    def reset(self, rows: Sequence[int]) -> None:
        for state in self.layers.values():
            state.reset(rows)

    def select(self, rows: Sequence[int]) -> None:
        for state in self.layers.values():
            state.select(rows)

    def join(self, others: Sequence[CacheFormerMemory]) -> None:
        for layer, state in self.layers.items():
            state.join([other.layers[layer] for other in others])

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
        return joined(**{str(layer): state.state_dict() for layer, state in self.layers.items()})

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for layer, state in self.layers.items():
            state.load_state_dict(part(tensors, str(layer)))
