"""The specification of CacheFormer's attention: one document, token by token, in the plainest way."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheformers.methods.cacheformer.cacheformer import CacheFormerOptions, CacheFormerParts, Projected, Rotate, normed

Vectors = list[tuple[Tensor, Tensor]]  # a key and a value each


def naive(
    options: CacheFormerOptions,
    parts: CacheFormerParts,
    projected: Projected,
    rotate: Rotate | None = None,
    text: int = 0,
) -> tuple[Tensor, list[list[list[int]]]]:
    """Attend to one document, a batch of one row.

    Args:
        text: how many of its tokens are a text that is read without retrieval (`reading_retrieves`).

    Returns:
        The output `[1, heads, time, head_dim]`, and the segments that each token retrieves, by kv head.
    """
    queries, time = projected.q[0] * projected.scale, projected.q.shape[2]
    gates = projected.gates(parts)
    group = options.heads // options.kv_heads
    outputs: list[list[Tensor]] = []
    lists: list[list[list[int]]] = []
    for kv_head in range(options.kv_heads):
        keys = projected.k[0, kv_head]
        values = keys if projected.v is None else projected.v[0, kv_head]
        source = projected.pooled_keys(options)[0, kv_head]
        near = list(zip(normed(parts.local_norm, keys), normed(parts.local_norm, values), strict=True))
        kept = [(rounded(key), rounded(value)) for key, value in near] if options.cache_int8 else near
        segments, half = time // options.pool_tokens, options.pool_tokens // 2
        heads = range(kv_head * group, (kv_head + 1) * group)
        if options.representatives == "compressed":
            asking, long = queries, [compress(options, parts, source, values, c, 0, rotate) for c in range(segments)]
        else:
            assert projected.plain_q is not None
            own = projected.plain_scaling
            looking = projected.plain_q if projected.looking is None else projected.looking
            asking = looking[0] * (projected.scale if own is None else own)
            long = [represent(options, source, projected.plain_q[0, heads], c) for c in range(segments)]
        shifted = [compress(options, parts, source, values, c, half, rotate) for c in range(segments + 1)]
        probabilities = [[segment_probabilities(options, asking[h, t], long, t) for t in range(time)] for h in heads]

        chosen = [choose(options, probabilities, t, time, text) for t in range(time)]
        lists.append(chosen)
        for head in heads:
            rows = []
            for t in range(time):
                start, horizon = int(options.window_start(torch.tensor(t))), int(options.horizon(torch.tensor(t)))
                s = options.pool_tokens
                branches: dict[str, Vectors] = {"short": near[start : t + 1]}
                branches["long"] = [
                    vector for c, vectors in enumerate(long) if (c + 1) * s <= horizon for vector in vectors
                ]
                branches["overlap"] = [
                    vector for j, vectors in enumerate(shifted) if j * s + half <= horizon for vector in vectors
                ]
                found = [c for c in chosen[t] if c >= 0]
                branches["cache"] = [
                    (moved(key, shift(options, start, c, len(found) - rank), rotate), value)
                    for rank, c in enumerate(found)
                    for key, value in kept[c * s : (c + 1) * s]
                ]
                seen = [branches[name] for name in options.branches]
                gate = None if gates is None else gates[0, head, t]
                rows.append(attend(options, queries[head, t], seen, gate))
            outputs.append(rows)
    return torch.stack([torch.stack(rows) for rows in outputs])[None], lists


def shift(options: CacheFormerOptions, start: int, c: int, left: int) -> int:
    """Say by how many positions the keys of segment c are moved, the first of `left` segments before the window."""
    if options.packed:
        return start - left * options.pool_tokens - c * options.pool_tokens
    return start - options.far_distance - c * options.pool_tokens if options.far_distance else 0


def moved(key: Tensor, shift: int, rotate: Rotate | None) -> Tensor:
    """Turn a key forward by `shift` positions; a negative shift leaves it where it is."""
    if rotate is None or shift <= 0:
        return key
    return rotate(key[None, None, None], torch.tensor([[shift]], dtype=torch.float64))[0, 0, 0]


def rounded(vector: Tensor) -> Tensor:
    """Round a vector to multiples of its largest number's 127th part, which is a number of float32."""
    exact = vector.detach().float()
    step = exact.abs().max().clamp(min=1e-30) / 127
    return ((exact / step).round() * step).to(vector.dtype)


def represent(options: CacheFormerOptions, keys: Tensor, queries: Tensor, number: int) -> Vectors:
    """Return the vectors by which a segment is found, from keys and queries before their rotation."""
    s = options.pool_tokens
    segment = slice(number * s, (number + 1) * s)
    own, queries = keys[segment].detach(), queries[:, segment].detach()
    if options.representatives == "mean":
        return [(own.mean(0), own.mean(0))]
    if options.representatives == "bounds":
        return [(own.amax(0), own.amin(0))]
    asked = queries.sum(0).mean(0)
    strongest = sorted(range(s), key=lambda place: (-float(own[place] @ asked), place))
    return [(own[place], own[place]) for place in strongest[: options.pool_vectors]]


def compress(
    options: CacheFormerOptions,
    parts: CacheFormerParts,
    keys: Tensor,
    values: Tensor,
    number: int,
    shift: int,
    rotate: Rotate | None,
) -> Vectors:
    """Compress a segment to its vectors (G_c), without positions before and after the text."""
    if parts.pool is None or (shift and not options.overlap):
        return []
    own = shift > 0 and parts.overlap_pool is not None
    projection = parts.overlap_pool if own else parts.pool
    assert projection is not None
    start = number * options.pool_tokens - shift
    end = start + options.pool_tokens
    if end > len(keys):
        return []
    segment = slice(max(start, 0), end)
    weights = torch.softmax(keys[segment] @ projection.weight.T.to(keys.dtype), 0)  # [s, r_s]
    vectors = []
    for column in range(options.pool_vectors):
        key = normed(parts.global_norm, (weights[:, column, None] * keys[segment]).sum(0))
        value = normed(parts.global_norm, (weights[:, column, None] * values[segment]).sum(0))
        if options.pretrained and rotate is not None:
            center = torch.tensor([[start + (options.pool_tokens - 1) / 2]], dtype=torch.float64)
            key = rotate(key[None, None, None], center)[0, 0, 0]
        vectors.append((key, value))
    return vectors


def segment_probabilities(options: CacheFormerOptions, query: Tensor, long: list[Vectors], t: int) -> list[Tensor]:
    """Return a row's softmax over all visible compressed columns, by segment `[r_s]`; zeros for hidden segments."""
    horizon = int(options.horizon(torch.tensor(t)))
    visible = [c for c in range(len(long)) if (c + 1) * options.pool_tokens <= horizon]
    if not options.long:  # otherwise all vectors are read
        visible = [c for c in visible if remembered(options, c, t)]
    found = [query.new_zeros(options.pool_vectors) for _ in long]
    if visible and options.cache:
        scores = torch.stack([score(options, query, vector) for c in visible for vector in long[c]]).detach()
        for c, share in zip(visible, torch.softmax(scores, 0).split(options.pool_vectors), strict=True):
            found[c] = share
    return found


def score(options: CacheFormerOptions, query: Tensor, vector: tuple[Tensor, Tensor]) -> Tensor:
    """Score a vector of a segment; the two of "bounds" are the largest and the smallest number of each channel."""
    key, other = vector
    return torch.maximum(query * key, query * other).sum() if options.representatives == "bounds" else query @ key


def choose(
    options: CacheFormerOptions, probabilities: list[list[list[Tensor]]], t: int, time: int, text: int = 0
) -> list[int]:
    """Choose the segments that row t retrieves, from `probabilities[head][row][segment]` of one group of heads.

    Rows of a text that is read without retrieval retrieve the first segment alone, if `sink`, and have no opinion.
    """
    if not options.cache:
        return []
    p = options.block_rows
    first = t // p * p
    if t < text:
        return [0] if options.sink and options.admissible(torch.tensor(first)) > 0 else []
    rows = {
        "previous_block": range(first - p, first),
        "token": range(t, t + 1),
        "prefix": range(first, t + 1),
        "paper_block": range(first, min(first + p, time)),
    }[options.selection]
    allowed = [c for c in range(int(options.admissible(torch.tensor(first)))) if remembered(options, c, t)]
    scores = []
    for c in allowed:
        score = 0.0
        for head in probabilities:
            shares = [head[row][c] for row in rows if row >= text]
            if shares and options.magnitude == "rows":
                score += float(torch.stack([share.norm() for share in shares]).mean())
            elif shares:
                score += float(torch.stack(shares).mean(0).norm())
        scores.append(score)
    chosen = choose_segments(scores, len(allowed), options.topk, options.neighbors, options.sink)
    return [allowed[place] if place >= 0 else -1 for place in chosen]


def remembered(options: CacheFormerOptions, c: int, t: int) -> bool:
    """Say whether segment c fits the budget of `cache_tokens` for row t."""
    if options.cache_tokens is None or (options.sink and c == 0):
        return True
    w, p = options.window_tokens, options.block_rows
    began = t // w * w if options.selection == "token" else t // p * p
    before = int(options.admissible(torch.tensor(began)))
    return c >= before - options.cache_tokens // options.pool_tokens + int(options.sink)


def choose_segments(scores: list[float], allowed: int, topk: int, neighbors: int, sink: bool = False) -> list[int]:
    """Choose the k best segments, neighbors and replacements: k*u ids, ascending, -1 at the end (section 5.3)."""
    ranked = sorted(range(allowed), key=lambda c: (not (sink and c == 0), -scores[c], c))
    hits = ranked[:topk]
    after = neighbors // 2
    before = neighbors - 1 - after
    taken: list[int] = []

    def take(c: int) -> None:
        if 0 <= c < allowed and c not in taken and len(taken) < topk * neighbors:
            taken.append(c)

    for hit in hits:
        take(hit)
        for distance in range(1, after + 1):
            take(hit + distance)
            if distance <= before:
                take(hit - distance)
    distance = 1
    while len(taken) < min(topk * neighbors, allowed):
        for hit in hits:
            take(hit + after + distance)
            take(hit - before - distance)
        distance += 1
    return sorted(taken) + [-1] * (topk * neighbors - len(taken))


def attend(options: CacheFormerOptions, query: Tensor, branches: list[Vectors], gate: Tensor | None) -> Tensor:
    """Attend from one token to its branches."""
    if options.aggregation == "joint":
        return read(query, [vector for branch in branches for vector in branch])
    total, weight = torch.zeros_like(query), query.new_zeros(())
    for number, branch in enumerate(branches):
        if branch:
            share = query.new_ones(()) if gate is None else gate[number]
            total, weight = total + share * read(query, branch), weight + share
    return total / weight


def read(query: Tensor, vectors: Vectors) -> Tensor:
    """Attend to vectors with one softmax."""
    keys, values = (torch.stack(side) for side in zip(*vectors, strict=True))
    return torch.softmax(keys @ query, 0) @ values
