"""CacheFormer: window, compressed segments, and a cache of the best raw segments (Singh & Mahmood, arXiv 2504.13981).

    short    keys of the token's window and of the whole previous window, w tokens each
    long     G_c = softmax(Z_c W_P^T)^T Z_c: r vectors for each complete segment Z_c of s tokens  (Transformer-LS, 2021)
    overlap  the same for segments shifted by s/2
    cache    the raw keys of the k segments whose probabilities in `long` are largest, and of their neighbors

A token attends to all four with one softmax (`joint`), or to each separately and takes the mean (`separate`) or a gated
mean (`gated`). Without overlap and cache this is Transformer-LS. The published choice of segments looks into the future
(`paper_block`, for study only); the other choices use what a decoder has seen.

This file holds settings, trained parts and pooling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cacheformers.methods.cacheformer.representatives import ONE_VECTOR, asking, represent
from cacheformers.modeling.method import check_at_least, check_choices, normalize, setting

NORM_EPS = 1e-5

Rotate = Callable[[Tensor, Tensor], Tensor]  # keys [rows, heads, tokens, head_dim], positions [rows, tokens]


@dataclass(repr=False)  # transformers prints a configuration
class CacheFormerSettings:
    """Fields of every configuration with CacheFormer's attention."""

    window_tokens: int = setting(
        128, "Window w: a token sees its own window up to itself, and all of the previous one."
    )
    pool_tokens: int = setting(16, "Tokens of a segment (s), compressed together.")
    pool_vectors: int = setting(4, "Vectors that a segment is compressed to (r_s).")
    topk: int = setting(7, "Segments that the cache retrieves uncompressed (k).")
    neighbors: int = setting(1, "Segments that each of them brings along, including itself (u).")
    select_rows: int | None = setting(
        None, "Rows that choose segments together (p). Default: window_tokens; 1 for 'token'."
    )
    selection: str = setting(
        "previous_block",
        "Who chooses for a block of rows: the previous block ('previous_block'), each row for itself ('token'), the "
        "block's rows so far ('prefix'), or, to study its leak, the whole block as published ('paper_block', which "
        "cannot generate).",
    )
    magnitude: str = setting("rows", "'rows': mean of the rows' magnitudes. 'mean': magnitude of their mean.")
    aggregation: str = setting(
        "joint",
        "'joint': one softmax over all branches. 'separate': the mean of one softmax per branch, over branches that "
        "are not empty. 'gated': their gated mean.",
    )
    long: bool = setting(True, "Attend to compressed segments.")
    overlap: bool = setting(True, "Attend also to compressed segments shifted by half a segment.")
    cache: bool = setting(True, "Attend to the tokens of retrieved segments (scored by `long`, even if that is off).")
    exclude_window: bool = setting(False, "Retrieve only segments before the window.")
    sink: bool = setting(False, "Always retrieve the first segment.")
    cache_tokens: int | None = setting(
        None,
        "Tokens of the segments that can be retrieved: the newest ones, and the first with `sink`. Older ones are "
        "forgotten. Default: all.",
    )
    cache_int8: bool = setting(
        False,
        "Keep what can be retrieved in 8 bits, with a scale for each token and head; only windows stay exact. "
        "No gradient reaches what is rounded.",
    )
    shared_projection: bool = setting(True, "Compress overlapping segments by the same projection.")
    wide_blocks: bool = setting(
        False,
        "Allow select_rows > window_tokens with 'previous_block'; tokens that have left the window cannot be "
        "retrieved before their block ends.",
    )


@dataclass(kw_only=True)
class CacheFormerOptions(CacheFormerSettings):
    """`CacheFormerSettings` for one layer; ValueError if they contradict each other.

    Attributes:
        heads, kv_heads, head_dim: shape of the layer's attention.
        tied: keys are also values.
        local_norm, global_norm: LayerNorm on the keys and values of tokens, and on compressed ones.
        representatives, far_distance, packed, reading_retrieves, retrieval_weight: see `CacheFormerOnBaseSettings`;
            only with `pretrained`.
        pretrained: for attention that was trained without this method. Keys are compressed before their rotation and
            then rotated to their segment's center. Only text wholly before the window is compressed or retrieved, so
            attention to a text of up to two windows stays as it was.
    """

    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = True
    local_norm: bool = True
    global_norm: bool = True
    pretrained: bool = False

    representatives = "compressed"  # not a field here: from scratch there is no other choice
    far_distance = 0
    packed = False
    reading_retrieves = True
    retrieval_weight = 0.0

    def __post_init__(self) -> None:
        kinds = {"int": (int,), "int | None": (int, type(None)), "bool": (bool,)}
        for entry in fields(self):
            value, allowed_kinds = getattr(self, entry.name), kinds.get(str(entry.type))
            if allowed_kinds and type(value) not in allowed_kinds:
                raise ValueError(f"{entry.name} must be {entry.type}, got {value!r}.")
        check_at_least(1, self, "heads", "kv_heads", "head_dim", "window_tokens", "pool_tokens", "pool_vectors", "topk")
        check_at_least(1, self, "neighbors")
        if self.representatives in ONE_VECTOR:
            self.pool_vectors = 1
        if self.select_rows is not None:
            check_at_least(1, self, "select_rows")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}.")
        check_choices(
            self,
            selection=("previous_block", "token", "prefix", "paper_block"),
            magnitude=("rows", "mean"),
            aggregation=("joint", "separate", "gated"),
        )
        if self.compresses and self.pool_tokens > 2 * self.window_tokens:
            raise ValueError(
                f"pool_tokens {self.pool_tokens} is more than two windows of {self.window_tokens}: recent tokens would "
                "be visible nowhere. Choose pool_tokens <= 2 * window_tokens."
            )
        if self.overlap and self.pool_tokens % 2:
            raise ValueError(f"overlap shifts segments by half: pool_tokens must be even, got {self.pool_tokens}.")
        if self.selection == "token" and self.select_rows not in (None, 1):
            raise ValueError(f"selection='token' chooses for each row: leave out select_rows={self.select_rows}.")
        if self.selection == "previous_block" and self.block_rows > self.window_tokens and not self.wide_blocks:
            raise ValueError(
                f"select_rows {self.block_rows} is more than window_tokens {self.window_tokens}: tokens that have left "
                "the window could not be retrieved before their block ends. Choose select_rows <= window_tokens, or "
                "set wide_blocks=True."
            )
        if self.cache_tokens is not None and self.cache_tokens < self.retrieved * self.pool_tokens:
            raise ValueError(
                f"cache_tokens {self.cache_tokens} is less than the {self.retrieved} segments of pool_tokens "
                f"{self.pool_tokens} that are retrieved at once: choose cache_tokens >= "
                f"{self.retrieved * self.pool_tokens}, or a smaller topk."
            )
        if self.pretrained and (self.tied or self.local_norm):
            raise ValueError("pretrained attention has its own keys and values: set tied=False and local_norm=False.")
        if self.pretrained and self.window_tokens % self.pool_tokens:
            raise ValueError(
                f"With pretrained=True a segment is before the window or in it: pool_tokens {self.pool_tokens} must "
                f"divide window_tokens {self.window_tokens}."
            )
        if self.cache and not self.causal:
            warnings.warn(
                "selection='paper_block' lets a token depend on tokens after it. Its losses are not what a decoder "
                "obtains; use it only to study that.",
                stacklevel=3,
            )

    @property
    def compresses(self) -> bool:
        """Whether any branch needs compressed segments."""
        return self.long or self.overlap or (self.cache and self.representatives == "compressed")

    @property
    def causal(self) -> bool:
        """Whether no token depends on a later one."""
        return not self.cache or self.selection != "paper_block"

    @property
    def block_rows(self) -> int:
        """The number of rows that choose together, p."""
        if self.selection == "token":
            return 1
        return self.window_tokens if self.select_rows is None else self.select_rows

    @property
    def retrieved(self) -> int:
        """The number of segments in a list, k*u."""
        return self.topk * self.neighbors

    @property
    def branches(self) -> tuple[str, ...]:
        """The branches that are on, in the order of gates."""
        return tuple(name for name in ("short", "long", "overlap", "cache") if name == "short" or getattr(self, name))

    def window_start(self, position: Tensor) -> Tensor:
        """Return the first position that a token's sliding window shows."""
        return ((position // self.window_tokens - 1) * self.window_tokens).clamp(min=0)

    def horizon(self, position: Tensor) -> Tensor:
        """Return the position before which a segment must end for a token to see its vectors.

        A previous block also scores segments of its own windows, because they may stand before those of the next block.
        """
        scored_early = self.representatives != "compressed" and self.selection == "previous_block"
        return self.window_start(position) if self.pretrained and not scored_early else position

    def block_start(self, position: Tensor) -> Tensor:
        """Return the first position of a token's block."""
        return position // self.block_rows * self.block_rows

    def admissible(self, position: Tensor) -> Tensor:
        """Count the segments, from the first on, that the block beginning at a position may retrieve."""
        before = self.window_start(position) if self.before_window else position
        return before // self.pool_tokens

    def filled(self, position: Tensor) -> Tensor:
        """Count the segments that a token retrieves."""
        return self.admissible(self.block_start(position)).clamp(max=self.retrieved)

    @property
    def sinks(self) -> int:
        """The number of segments, from the first on, that are never forgotten."""
        return int(self.sink and self.cache)

    @property
    def chooses(self) -> bool:
        """Whether there is a choice: not if the first segment is all that is retrieved."""
        return self.cache and self.retrieved > self.sinks

    def by_windows(self) -> Self:
        """Return the same options without a choice: tokens see windows, and the first segment with `sink`."""
        return replace(self, topk=1, neighbors=1, cache=self.sink and self.cache)

    def gone(self, position: Tensor) -> Tensor:
        """Count the segments after the sinks that a token cannot retrieve any more, with `cache_tokens`.

        They are those that did not fit when its block began, or its window where every token chooses for itself, so
        all tokens of a tile agree.
        """
        if self.cache_tokens is None:
            return torch.zeros_like(position)
        by_token = self.selection == "token"
        begins = position // self.window_tokens * self.window_tokens if by_token else self.block_start(position)
        return (self.admissible(begins) - self.cache_tokens // self.pool_tokens).clamp(min=0)

    def unscored(self, position: Tensor) -> Tensor:
        """Count the segments after the sinks that a token does not even score: with `long` it sees all vectors."""
        return torch.zeros_like(position) if self.long else self.gone(position)

    @property
    def joins_blocks(self) -> bool:
        """Whether all blocks that begin in a window can retrieve the same segments of the budget."""
        return not self.cache or self.cache_tokens is None or self.selection == "token" or self.before_window

    @property
    def joins_windows(self) -> bool:
        """Whether a tile may be of several windows: tokens that choose for themselves share columns within one."""
        return not self.cache or (self.cache_tokens is None and self.selection == "previous_block")

    @property
    def before_window(self) -> bool:
        """Whether only segments before the window are retrieved."""
        return self.exclude_window or self.pretrained

    def left(self, position: Tensor) -> Tensor:
        """Count the segments after the sinks of which no token from a position on retrieves a key."""
        before = self.window_start(position) // self.pool_tokens
        return torch.minimum(self.gone(position), (before - self.sinks).clamp(min=0)) if self.cache else before

    @property
    def rounds(self) -> bool:
        """Whether windows and the cache read different stores."""
        return self.cache and self.cache_int8

    def window_left(self, position: Tensor) -> Tensor:
        """The same for keys of the store that windows read."""
        return self.window_start(position) // self.pool_tokens if self.rounds else self.left(position)

    @property
    def most_tokens(self) -> int | None:
        """Tokens that can be retrieved or are near, at most; None without a bound."""
        near = 2 * self.window_tokens + max(self.window_tokens, self.block_rows) + self.pool_tokens
        return None if self.cache_tokens is None else self.cache_tokens + near

    @property
    def most_window_tokens(self) -> int | None:
        """The same for keys of the store that windows read."""
        return 2 * self.window_tokens + self.pool_tokens if self.rounds or not self.cache else self.most_tokens

    @property
    def most_vectors(self) -> int | None:
        """Vectors that segments are scored by, held at most where nothing else reads them."""
        return None if self.most_tokens is None else -(-self.most_tokens // self.pool_tokens) * self.pool_vectors


class BranchGate(nn.Module):
    """A gate between 0 and 1 for each token, head and branch, computed from the query; 0.5 at first."""

    def __init__(self, heads: int, branches: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, branches, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, branches))

    def forward(self, queries: Tensor) -> Tensor:
        """Turn `[rows, heads, time, head_dim]` into `[rows, heads, time, branches]`, in float32 or better."""
        wide = queries.to(torch.promote_types(queries.dtype, torch.float32))
        scores = wide @ self.weight.to(wide.dtype).transpose(1, 2) + self.bias.to(wide.dtype)[:, None]
        return torch.sigmoid(scores)


class CacheFormerParts(NamedTuple):
    """The trained parts of one layer; None where its options need none. All but `gate` and `query` are shared by heads.

    Shapes: `pool`, `overlap_pool` `[r_s, head_dim]`; `local_norm`, `global_norm` LayerNorm(head_dim); `query`
    `[heads * head_dim, h]`, see `supervision.py`.
    """

    pool: nn.Linear | None = None
    overlap_pool: nn.Linear | None = None
    local_norm: nn.LayerNorm | None = None
    global_norm: nn.LayerNorm | None = None
    gate: BranchGate | None = None
    query: nn.Linear | None = None


def make_parts(options: CacheFormerOptions) -> dict[str, nn.Module]:
    """Make the parts of one layer."""
    parts: dict[str, nn.Module] = {}
    if options.compresses:
        parts["pool"] = nn.Linear(options.head_dim, options.pool_vectors, bias=False)
        if options.overlap and not options.shared_projection:
            parts["overlap_pool"] = nn.Linear(options.head_dim, options.pool_vectors, bias=False)
        if options.global_norm:
            parts["global_norm"] = nn.LayerNorm(options.head_dim, eps=NORM_EPS)
    if options.local_norm:
        parts["local_norm"] = nn.LayerNorm(options.head_dim, eps=NORM_EPS)
    if options.aggregation == "gated":
        parts["gate"] = BranchGate(options.heads, len(options.branches), options.head_dim)
    return parts


class Projected(NamedTuple):
    """Queries, keys and values of consecutive tokens, `[rows, heads or kv_heads, time, head_dim]`.

    Attributes:
        q, k: rotated where the model rotates.
        v: None where keys are also values.
        plain_q, plain_k: before rotation; None where nothing was rotated. Gates and means of segments read `plain_q`,
            `pretrained` pools `plain_k`.
        scaling: of `q`; None for `head_dim ** -0.5`.
        plain_scaling: of `plain_q`, where it is another one: OPT's `q` are scaled already.
        looking: queries that choose segments, scaled as `plain_q`; None where that chooses.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None
    plain_q: Tensor | None = None
    plain_k: Tensor | None = None
    scaling: float | None = None
    plain_scaling: float | None = None
    looking: Tensor | None = None

    @property
    def scale(self) -> float:
        """The factor of queries."""
        return self.q.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def gates(self, parts: CacheFormerParts) -> Tensor | None:
        """Compute gates `[rows, heads, time, branches]`."""
        if parts.gate is None:
            return None
        return parts.gate(self.q if self.plain_q is None else self.plain_q)

    def pooled_keys(self, options: CacheFormerOptions) -> Tensor:
        """Return the keys from which segments are compressed."""
        return self.plain_k if options.pretrained and self.plain_k is not None else self.k

    def asking(self, options: CacheFormerOptions) -> Tensor | None:
        """Return the queries that score segments once they are multiplied by `scale`, where they are not `q`."""
        if options.representatives == "compressed" or self.plain_q is None:
            return None
        looking = self.plain_q if self.looking is None else self.looking
        queries = asking(options.representatives, looking.detach())
        return queries if self.plain_scaling is None else queries * (self.plain_scaling / self.scale)

    def strengths(self, options: CacheFormerOptions) -> Tensor | None:
        """Return the queries that say which tokens of a segment represent it, summed over heads that share keys."""
        if options.representatives != "tokens" or self.plain_q is None:
            return None
        return self.plain_q.detach().unflatten(1, (options.kv_heads, -1)).sum(2)

    def each(self, change: Callable[[Tensor], Tensor]) -> Projected:
        """Apply a function to every tensor."""
        tensors = {name: part for name, part in self._asdict().items() if isinstance(part, Tensor)}
        return self._replace(**{name: change(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]  # names of its tensors


def normed(norm: nn.LayerNorm | None, vectors: Tensor) -> Tensor:
    """Apply LayerNorm in float32 or better; None changes nothing."""
    return vectors if norm is None else normalize(norm, vectors).to(vectors.dtype)


def pool(
    options: CacheFormerOptions,
    parts: CacheFormerParts,
    keys: Tensor,
    values: Tensor | None,
    numbers: Tensor,
    overlap: bool,
    rotate: Rotate | None,
    queries: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compress each segment to r_s sums of its tokens, G_c, weighted by W_P of the keys.

    Representatives of another kind have neither positions nor values, because they are only scored.

    Args:
        keys, values: tokens of segments, `[rows, kv_heads, segments, s, head_dim]`.
        numbers: of the segments, `[rows or 1, segments]`.
        overlap: segments are shifted to the left by s/2; the first half of segment 0 is then not text.
        rotate: turns keys to positions, where keys were given unrotated.
        queries: `Projected.strengths` of the same tokens.

    Returns:
        Keys and values `[rows, kv_heads, segments*r_s, head_dim]`, a segment's vectors side by side.
    """
    if options.representatives != "compressed":
        return represent(options.representatives, options.pool_vectors, keys, queries), None
    assert parts.pool is not None
    size, half = options.pool_tokens, options.pool_tokens // 2
    projection = parts.overlap_pool if overlap and parts.overlap_pool is not None else parts.pool
    dtype = torch.promote_types(keys.dtype, torch.float32)
    scores = F.linear(keys, projection.weight.to(keys.dtype)).to(dtype)  # [rows, kv_heads, segments, s, r_s]
    if overlap:
        blank = (numbers == 0)[:, :, None] & (torch.arange(size, device=numbers.device) < half)
        scores = scores.masked_fill(blank[:, None, :, :, None], float("-inf"))
    weights = torch.softmax(scores, -2).to(keys.dtype).transpose(-1, -2)
    pooled_keys = normed(parts.global_norm, weights @ keys).flatten(2, 3)
    if options.pretrained and rotate is not None:
        center = numbers * size + (size - 1) / 2 - (half if overlap else 0)
        center = center.repeat_interleave(options.pool_vectors, 1).expand(len(keys), -1)
        pooled_keys = rotate(pooled_keys, center)
    if values is None:
        return pooled_keys, None
    return pooled_keys, normed(parts.global_norm, weights @ values).flatten(2, 3)
