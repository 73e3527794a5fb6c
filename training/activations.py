"""What autograd keeps of a forward through a frozen base with a trained adapter, in bytes, term by term.

A frozen linear layer keeps nothing: its input gradient needs only its weight. What is kept are the inputs of trained
matrices and what norms, attention and elementwise functions need for their gradients. Layers below the first trained
one have no graph at all. `tests/training/test_estimate.py` compares these terms with the tensors that autograd really
saves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peft.tuners.lora import LoraLayer
from torch import nn

from cacheformers.methods.neurocache.options import NeurocacheOptions
from cacheformers.modeling.memory import BaseShape

FLOAT32 = 4


@dataclass(frozen=True)
class Forward:
    """One forward: how much is read, and in what.

    Attributes:
        rows: rows of the micro-batch.
        segment_tokens: tokens of a segment.
        segments: segments that one forward reads before a backward.
        element: bytes of an activation (2 in bfloat16).
        keeps_inputs: frozen linear layers keep their inputs (bitsandbytes does in 8 bit).
        device_type: "cpu" or "cuda".
    """

    rows: int
    segment_tokens: int
    segments: int
    element: int
    keeps_inputs: bool
    device_type: str

    @property
    def tokens(self) -> int:
        return self.rows * self.segment_tokens * self.segments

    @property
    def half(self) -> bool:
        """Activations are narrower than the adapter, so the adapter works on copies."""
        return self.element < FLOAT32


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one decoder layer.

    Attributes:
        attention: kept by the norm, self-attention and the memory's branch.
        feed_forward: kept by the norm and the feed-forward block.
        attention_work: most that the backward of the branch needs besides.
        feed_forward_work: most that the backward of the feed-forward block needs besides.
        graph: the layer's output has a graph.
    """

    attention: int
    feed_forward: int
    attention_work: int
    feed_forward_work: int
    graph: bool

    @property
    def kept(self) -> int:
        return self.attention + self.feed_forward


def layer_bytes(
    layer: nn.Module,
    index: int,
    base: BaseShape,
    width: int,
    options: NeurocacheOptions | None,
    step: Forward,
    graph: bool,
) -> LayerBytes:
    """What one decoder layer keeps.

    Args:
        layer: the real module, on any device.
        width: size of the feed-forward block.
        options: of the memory; None for LoRA alone.
        graph: the layer's input has a graph (a layer below is trained).
    """
    attends = options is not None and index in options.attention_layers
    loras = [(name, module) for name, module in layer.named_modules() if isinstance(module, LoraLayer)]
    beside = [module for name, module in loras if "attn" in name or "attention" in name]
    within = [module for name, module in loras if "attn" not in name and "attention" not in name]
    dropout = getattr(layer, "dropout", 0.0) > 0
    norm = norm_bytes(layer, base.hidden_size, step)

    attention = lora_bytes(beside, step)
    if graph or beside:
        attention += attention_bytes(base, options, step)
    if graph:
        attention += norm
        attention += step.element * base.hidden_size * (1 if step.keeps_inputs else 0)
    if (graph or beside or attends) and dropout:
        attention += dropout_bytes(base.hidden_size, step)
    attention *= step.tokens
    attention_work = 0
    if options is not None and attends:
        attention += branch_bytes(options, step) * step.tokens + branch_weight_bytes(options, step, graph)
        attention_work = branch_work(options, step)
    if options is not None and index in dict(options.retrieval_map):
        attention += retrieval_bytes(options, step)

    reached = graph or attends or bool(beside)
    # Llama keeps what goes into SiLU, and both factors; OPT what comes out of ReLU, which in float32 LoRA keeps anyway.
    feed_forward = lora_bytes(within, step)
    if reached:
        feed_forward += norm + (dropout_bytes(base.hidden_size, step) if dropout else 0)
        feed_forward += step.element * (base.hidden_size + width) * (1 if step.keeps_inputs else 0)
    if gated(layer):
        feed_forward += step.element * width * (3 if reached or within else 0)
    elif step.half or not within or not isinstance(getattr(layer, "activation_fn", None), nn.ReLU):
        feed_forward += step.element * width * (1 if reached or within else 0)
    return LayerBytes(
        attention,
        feed_forward * step.tokens,
        attention_work,
        feed_forward_work(width, bool(within), step),
        reached or bool(within),
    )


def gated(layer: nn.Module) -> bool:
    """Whether the feed-forward block multiplies two projections, as Llama's does."""
    return any(name.endswith("gate_proj") for name, _ in layer.named_modules())


def norm_bytes(layer: nn.Module, hidden: int, step: Forward) -> int:
    """A norm, per token: LayerNorm keeps its input, RMSNorm its input in float32; and a number or two."""
    if any(isinstance(child, nn.LayerNorm) for child in layer.children()):
        return step.element * hidden + 2 * FLOAT32
    return FLOAT32 * hidden + FLOAT32


def attention_bytes(base: BaseShape, options: NeurocacheOptions | None, step: Forward) -> int:
    """Self-attention by a fused kernel, per token: q, k, v, its output, and a log-sum a head.

    Columns of earlier segments that a local window keeps need a mask, and with it k and v are repeated for every head.
    """
    queries, keys = base.heads * base.head_dim, base.kv_heads * base.head_dim
    kept = step.element * (2 * queries + 2 * keys) + FLOAT32 * base.heads
    if options is None or options.window.positions == options.segment_tokens:
        return kept
    seen = options.window.positions
    return kept + step.element * (2 * queries * seen // options.segment_tokens - 2 * keys + seen)


def dropout_bytes(hidden: int, step: Forward) -> int:
    """A dropout mask, per token: one byte each on a GPU, a number each on the CPU."""
    return hidden * (step.element if step.device_type == "cpu" else 1)


def lora_bytes(modules: list[LoraLayer], step: Forward) -> int:
    """LoRA, per token: A's input and B's input, both in float32.

    On a half-precision base every matrix has a copy of its input; on a float32 base matrices share it.
    """
    kept, shared = 0, set[int]()
    for module in modules:
        rank, taken = sum(module.r.values()), int(module.in_features or 0)
        if step.half or taken not in shared:
            kept += FLOAT32 * taken
        shared.add(taken)
        kept += FLOAT32 * rank
    return kept


def states(options: NeurocacheOptions) -> int:
    """N, the states that a token retrieves."""
    return options.topk * options.neighborhood_size


def branch_bytes(options: NeurocacheOptions, step: Forward) -> int:
    """Cache attention, per token.

    Kept are x; scaled queries; queries in the space of entries; two masks; probabilities, in float32 and rounded;
    mixed entries; the heads' outputs before and after the gate. Of the retrieved states it keeps views only.
    """
    base, seen = options.base, states(options) * options.context_size
    queries, entries = base.heads * base.head_dim, base.heads * options.width
    kept = step.element * (base.hidden_size + 2 * queries + 2 * entries)
    kept += 2 * seen + (FLOAT32 + step.element) * base.heads * seen
    if options.gate == "zero":
        kept += step.element * queries
    return kept


def branch_weight_bytes(options: NeurocacheOptions, step: Forward, graph: bool) -> int:
    """Copies of W_q, W_k, W_v and W_o in the base's precision; W_q's is kept where x has a gradient."""
    if not step.half:
        return 0
    base = options.base
    queries, keys = base.heads * base.head_dim, base.kv_heads * base.head_dim
    kept = base.hidden_size * queries * (2 if graph else 1) + 2 * keys * options.width
    return step.element * kept * step.segments


def retrieved_bytes(options: NeurocacheOptions, step: Forward) -> int:
    """Retrieved states `[rows, c-1+time, N, d]`."""
    tokens = step.tokens + step.rows * step.segments * (options.context_size - 1)
    return step.element * tokens * states(options) * options.width


def retrieval_bytes(options: NeurocacheOptions, step: Forward) -> int:
    """What a retrieval layer keeps: the retrieved states, where they came from, and what W_p and its norm need.

    Every different entry is encoded once: at most the whole ring, and at most all that was retrieved.
    """
    found = step.rows * (step.segment_tokens + options.context_size - 1) * states(options)
    places = 8 * found * step.segments
    different = min(found, step.rows * options.cache_size) * step.segments
    kept = retrieved_bytes(options, step) + places
    if options.compression_factor > 1:
        kept += different * (step.element * options.base.hidden_size + FLOAT32 * (options.width + 2))
    return kept


def branch_work(options: NeurocacheOptions, step: Forward) -> int:
    """Backward of cache attention: gradients of the states, one a product and their sum, each for all c tokens back."""
    return (2 + options.context_size) * retrieved_bytes(options, replace(step, segments=1))


def feed_forward_work(width: int, lora: bool, step: Forward) -> int:
    """Backward of the feed-forward block: gradients of its two or three wide activations; in float32 through LoRA."""
    tokens = step.rows * step.segment_tokens
    return tokens * width * (2 * step.element + (2 * FLOAT32 if lora and step.half else step.element))


def rotary_bytes(base: BaseShape, step: Forward) -> int:
    """Cosines and sines, once a forward."""
    return 2 * step.element * base.head_dim * step.tokens if base.rotary else 0


def hidden_bytes(base: BaseShape, step: Forward) -> int:
    """Hidden states between two layers: what activation checkpointing keeps of a layer."""
    return step.element * base.hidden_size * step.tokens
