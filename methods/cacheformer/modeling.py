"""CacheFormer as model classes of transformers: the paper's own transformer, trained from scratch.

    hidden = embed(ids)
    L times:  hidden += attention(norm(hidden));  hidden += feed_forward(norm(hidden))
    logits = head(norm(hidden))

A forward with gradients, or without a cache, attends to whole documents; with a cache it reads the ids as a decoder
does. Both compute the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from cacheformers.methods.cacheformer.attention import attend, selected_segments
from cacheformers.methods.cacheformer.cacheformer import (
    NORM_EPS,
    BranchGate,
    CacheFormerParts,
    Projected,
    make_parts,
)
from cacheformers.methods.cacheformer.configuration import CacheFormerConfig
from cacheformers.methods.cacheformer.memory import CacheFormerModelOptions, CacheFormerReading
from cacheformers.methods.cacheformer.state import CacheFormerState
from cacheformers.modeling.cache import MemoryCache, check_blank
from cacheformers.modeling.inputs import ChecksPrompts, check_shape, real_tokens, refuse_looking_ahead
from cacheformers.modeling.memory import refuse_not_finite
from cacheformers.modeling.method import MemoryMethod, MethodOnLayer, first_numbers
from cacheformers.modeling.offloading import keep_in_memory
from cacheformers.modeling.pretrained import ForwardWithHead, MemoryPreTrainedModel
from cacheformers.modeling.rotary import Rotation
from cacheformers.modeling.segments import match_rows, new_memory


def rotation_at(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Compute the rotation to positions `[rows or 1, time]`, for activations of a dtype, in float32 or better."""
    exact = torch.promote_types(dtype, torch.float32)
    channels = torch.arange(0, head_dim, 2, device=positions.device, dtype=exact)
    angles = positions[..., None].to(exact) * theta ** (-channels / head_dim)
    return Rotation(angles.cos(), angles.sin(), neighbors=True)


class Places(NamedTuple):
    """Where each token of a forward belongs, for rows of any length, padded, or packed.

    Attributes:
        positions: in the token's document, `[rows or 1, time]`.
        documents: number of the token's document in its row, -1 for padding, `[rows, time]` on the host; None where
            each row is a document. Used without a cache.
        real: which columns are not padding, `[rows, time]` on the host; None for all. Used with a cache.
    """

    positions: Tensor
    documents: Tensor | None = None
    real: Tensor | None = None


def documents_of(real: Tensor, position_ids: Tensor | None) -> Places:
    """Find each token's document, and its position there.

    Args:
        real: which columns are not padding, `[rows, time]` on the host.
        position_ids: `[rows or 1, time]`, restart at 0 where a document begins; None: each row is a document.

    Raises:
        ValueError: padding inside a document, or positions that do not count a document's tokens.
    """
    time = real.shape[1]
    if position_ids is not None and position_ids.shape[-1] != time:
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}, but there are {time} tokens a row.")
    if position_ids is None and bool(real.all()):
        return Places(torch.arange(time)[None])
    count = real.cumsum(1)
    begins = real & (count == 1)
    given = None if position_ids is None else position_ids.cpu().expand(len(real), -1)
    if given is not None:
        begins |= real & (given == 0)
    first = torch.where(begins, count, 0).cummax(1).values
    positions = (count - first).clamp(min=0)
    if given is not None and bool((real & (given != positions)).any()):
        raise ValueError(
            "position_ids must count each document's tokens from 0. Leave them out, unless documents are packed into a "
            "row."
        )
    after_padding = real[:, 1:] & ~real[:, :-1]
    if bool((after_padding & ~begins[:, 1:]).any()):
        raise ValueError("attention_mask has padding inside a document: pad on the left or on the right.")
    documents = torch.where(real, begins.cumsum(1) - 1, -1)
    alone = bool(real.all()) and bool((documents == 0).all())
    return Places(positions, None if alone else documents)


def continued(real: Tensor, position_ids: Tensor | None, cache: MemoryCache) -> Places:
    """Find the places of tokens that follow what a cache has read; raise ValueError for a new document.

    `generate` counts the positions of its prompt from 0, although it may follow on what `read` has read.
    """
    count = real.cumsum(1)
    positions = (torch.tensor(cache.tokens_read)[:, None] + count - 1).clamp(min=0)
    inside = positions > 0 if cache.visible else count > 1
    if position_ids is not None and bool((real & (position_ids.cpu() == 0) & inside).any()):
        raise ValueError(
            "position_ids restart, but with a cache every row goes on with its document: leave them out, and call "
            "cache.reset([row]) before a new document."
        )
    return Places(positions, real=None if bool(real.all()) else real)


class CacheFormerLayerParts(MethodOnLayer, nn.ModuleDict):
    """The trained parts of one layer's attention beside its projections, by name."""

    options: Any = None

    def __init__(self, options: CacheFormerModelOptions, layer: int) -> None:
        super().__init__(make_parts(options))
        self.options, self.layer = options, layer

    @property
    def method(self) -> MemoryMethod:  # type: ignore[override]  # set elsewhere
        return self.options.method

    @property
    def active_parts(self) -> CacheFormerParts:
        return CacheFormerParts(**dict(self.items()))  # type: ignore[arg-type]  # names of its parts

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """A few trained numbers, the same in every precision."""
        return first_numbers(*(parameter.to(torch.bfloat16) for parameter in self.parameters()))

    def check_loaded(self) -> None:
        """Raise ValueError if LoRA was put on one of the parts, where it has no effect."""
        wrapped = [name for name, part in self.items() if hasattr(part, "base_layer")]
        if wrapped:
            raise ValueError(
                f"LoRA was put on memory.{wrapped[0]}, where it has no effect: name projections in target_modules "
                "(q_proj, kv_proj, o_proj, up_proj, down_proj). To train the rest: modules_to_save=['memory']."
            )


class CacheFormerSelfAttention(nn.Module):
    """CacheFormer's attention with its projections; `memory` holds `CacheFormerParts`."""

    def __init__(self, config: CacheFormerConfig, options: CacheFormerModelOptions, layer: int) -> None:
        super().__init__()
        self.options = options
        wide, narrow = options.heads * options.head_dim, options.kv_heads * options.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        if options.tied:
            self.kv_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        else:
            self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size)
        self.memory = CacheFormerLayerParts(options, layer)

    @property
    def parts(self) -> CacheFormerParts:
        """The trained parts; raise ValueError if LoRA was put on one of them, where it has no effect."""
        self.memory.check_loaded()
        keep_in_memory(self.memory)
        return self.memory.active_parts

    def project(self, hidden: Tensor, rotation: Rotation) -> Projected:
        """Compute q, k and v of `[rows, time, hidden_size]`. Values are rotated only where keys are values."""

        def split(vectors: Tensor) -> Tensor:
            return vectors.unflatten(-1, (-1, self.options.head_dim)).transpose(1, 2)

        plain_q = split(self.q_proj(hidden))
        keys = self.kv_proj if self.options.tied else self.k_proj
        k = rotation.turn(split(keys(hidden)))
        v = None if self.options.tied else split(self.v_proj(hidden))
        return Projected(rotation.turn(plain_q), k, v, plain_q)

    def forward(
        self, hidden: Tensor, rotation: Rotation, places: Places, state: CacheFormerState | None = None
    ) -> Tensor:
        """Attend; `[rows, time, hidden_size]` in and out."""
        read = self.attend(self.project(hidden, rotation), places, state)
        return self.o_proj(read.transpose(1, 2).flatten(2))

    # This part decides on the host what to look up; the rest compiles.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def attend(self, projected: Projected, places: Places, state: CacheFormerState | None) -> Tensor:
        """Return what heads read, `[rows, heads, time, head_dim]`."""
        if state is not None:
            return state.attend(self.parts, projected, real=places.real)
        return attend(self.options, self.parts, projected, documents=places.documents)

    def selected_segments(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Return the segments that each token retrieves, each row a document, `[rows, kv_heads, time, k*u]`."""
        return selected_segments(self.options, self.parts, self.project(hidden, rotation))


class CacheFormerFeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, config: CacheFormerConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(hidden)))


class CacheFormerLayer(GradientCheckpointingLayer):
    """Attention and a feed-forward block, each with a LayerNorm before it and a residual connection."""

    def __init__(self, config: CacheFormerConfig, options: CacheFormerModelOptions, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.self_attn = CacheFormerSelfAttention(config, options, layer)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.mlp = CacheFormerFeedForward(config)

    def forward(
        self, hidden: Tensor, rotation: Rotation, places: Places, state: CacheFormerState | None = None
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, places, state)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class CacheFormerPreTrainedModel(MemoryPreTrainedModel):
    """Initialization of both CacheFormer models."""

    config_class = CacheFormerConfig
    _no_split_modules = ["CacheFormerLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_record_outputs = {"hidden_states": CacheFormerLayer}
    _is_stateful = True  # tokens once read cannot be removed, so assisted decoding is refused

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # PyTorch's defaults, as published.
        if isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            if module.bias is not None:
                reach = module.in_features**-0.5
                init.uniform_(module.bias, -reach, reach)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, BranchGate):
            init.zeros_(module.weight)
            init.zeros_(module.bias)


class CacheFormerModel(CacheFormerPreTrainedModel):
    """A CacheFormer without a head."""

    def __init__(self, config: CacheFormerConfig) -> None:
        super().__init__(config)
        self.options = config.attention_options()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(CacheFormerLayer(config, self.options, layer) for layer in layers)
        self.norm = nn.LayerNorm(config.hidden_size, eps=NORM_EPS)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]  # transformers'

    @capture_outputs  # type: ignore[untyped-decorator]  # transformers'
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read ids `[rows, time]`.

        Args:
            attention_mask: `[rows, time]`, 0 for padding; with a cache also of all ids that it has seen.
            position_ids: `[rows or 1, time]`; only needed to pack documents: each begins where they restart at 0.
            past_key_values: a `MemoryCache` of this model to go on with.
            inputs_embeds: `[rows, time, hidden_size]`, instead of ids.
            use_cache: make a cache if none is passed. A cache carries no gradient.

        Raises:
            ValueError: a cache with gradients, of another kind, or with packed documents; positions that do not count
                a document's tokens; a request for attentions, which are never held as a whole.
        """
        if kwargs.get("output_attentions", self.config.output_attentions):
            raise ValueError(
                "Attentions are not available: they are never held as a whole. For the segments that tokens retrieve: "
                "cacheformers segments."
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass either input_ids or inputs_embeds.")
        check_shape(input_ids)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache, reading, places = self.prepare(hidden, attention_mask, position_ids, past_key_values, bool(use_cache))
        rotation = rotation_at(places.positions, self.options.head_dim, self.config.rope_theta, hidden.dtype)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, places, None if reading is None else reading.after[number])
        if cache is not None:
            store(cache, reading, hidden, places.real, input_ids)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=cache)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def prepare(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool,
    ) -> tuple[MemoryCache | None, CacheFormerReading | None, Places]:
        """Return the cache to read into, the states of its layers, and the tokens' places; see `forward`."""
        cache = reading = None
        if use_cache or past_key_values is not None:
            if torch.is_grad_enabled():
                raise ValueError(
                    "A cache carries no gradient: decode under torch.no_grad(), or leave use_cache and past_key_values "
                    "out."
                )
            refuse_looking_ahead(self.options)
            if isinstance(past_key_values, MemoryCache):
                cache = past_key_values
            else:
                check_blank(past_key_values)
                cache = new_memory(self, len(hidden))
            match_rows(self, cache, len(hidden), self.options)
            reading = cache.state.begin()
            reading.after = {layer: state.successor() for layer, state in reading.before.items()}
        real = real_tokens(attention_mask, hidden[..., 0], 0 if cache is None else cache.visible)
        places = documents_of(real, position_ids) if cache is None else continued(real, position_ids, cache)
        return cache, reading, places._replace(positions=places.positions.to(hidden.device))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def store(
    cache: MemoryCache,
    reading: CacheFormerReading | None,
    hidden: Tensor,
    real: Tensor | None,
    ids: Tensor | None,
) -> None:
    """Let a cache hold what a forward read, whose last hidden states `[rows, time, hidden_size]` must be finite.

    Args:
        real: which columns are not padding, `[rows, time]` on the host; None for all.
        ids: `[rows, time]`; None where there are none.
    """
    real = torch.ones(hidden.shape[:2], dtype=torch.bool) if real is None else real
    refuse_not_finite(hidden, real)
    cache.state.end(reading)
    cache.count(real, real.long() if ids is None else ids)


class CacheFormerForCausalLM(ForwardWithHead, ChecksPrompts, CacheFormerPreTrainedModel, GenerationMixin):
    """A CacheFormer language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: CacheFormerConfig) -> None:
        super().__init__(config)
        self.model = CacheFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers'

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as in transformers; raise ValueError with `selection="paper_block"`, which looks ahead."""
        refuse_looking_ahead(self.model.options)
        check_shape(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")))
        return super().generate(*args, **kwargs)
