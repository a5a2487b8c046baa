"""Attention over the cached keys and values, read once per group of query heads.

    E head dim    P cached positions    W lanes    G query heads per key/value head    B blocks of 32 in E, rounded up
    R query rows together: the G heads of one token, or of several tokens

A token's P positions are cut into at most MAX_CHUNKS chunks, whose length follows from P alone. Each chunk leaves the sum of
its weighted values with the largest score and the sum of weights; :func:`combine` joins them in order. So any thread may
take any chunk, or several tokens at once, and the bits are the same.

Keys are cached in tiles of W positions with a vector holding one component of W keys, so scores come out as vectors; values
lie row by row. Layout and formats: ``engine/simd/attend.py``. f32 and f16 store what was computed. q8_0 stores blocks of 32
components as ggml's Q8_0 (f16 scale, i8 codes; a last short block where E is no multiple of 32); its scores are products of
codes, with the query quantised likewise, and its values are widened. Sums are f32 in every format.

``parts`` f32 holds per row [largest score: MAX_CHUNKS][sum: MAX_CHUNKS][weighted values: MAX_CHUNKS, E padded to W].
Query rows are f32 ``q`` and i8 ``qi`` [row][E padded to 32], f32 ``qs`` and i32 ``qn`` [row][B]; the padding stays zero.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.elementwise import head_norm, quantize, rotate
from deepthin.engine.simd import (
    CACHE_F16,
    CACHE_F32,
    CACHE_Q8_0,
    MAX_ROWS,
    Q8_BIAS,
    W,
    add,
    exp,
    fma,
    load_f16,
    load_f32,
    maximum,
    mix_rows,
    mul,
    never_inline,
    reduce_add,
    reduce_max,
    score_rows,
    splat,
    store_f16,
    store_f32,
    store_scalar_f16,
    store_scalar_f32,
    sub,
)

MIN_CHUNK = 64  # positions; a multiple of every W
MAX_CHUNKS = 16  # a multiple of every W
MIX_POSITIONS = 64  # whose values stay in the first cache for all columns; from memory 5 % faster than whole chunks
ROWS_TOGETHER = 16  # query rows that pass over a chunk while it stays in the first cache


@kernel
def chunk_length(positions):
    """Positions per chunk of a token that sees ``positions``: the shortest doubling of MIN_CHUNK that MAX_CHUNKS cover."""
    length = MIN_CHUNK
    while length * MAX_CHUNKS < positions:
        length *= 2
    return length


@kernel
def row_stride(head_dim):
    """Floats that one query row takes in ``parts``."""
    return MAX_CHUNKS * (2 + (head_dim + W - 1) // W * W)


@kernel
def turned(out, out_at, x, x_at, norms, norm_at, eps, cosine, sine, table_at, head_dim, scale):
    """One head of x, normalised by the weights at ``norm_at`` unless that is negative, then rotated, times ``scale``."""
    never_inline()
    if norm_at < 0:
        rotate(out, out_at, x, x_at, cosine, sine, table_at, head_dim // 2, scale)
    else:
        head_norm(out, out_at, x, x_at, norms, norm_at, head_dim, eps)
        for e in range(head_dim, (head_dim + W - 1) // W * W):  # not 0 after a NaN
            out[out_at + e] = np.float32(0)
        rotate(out, out_at, out, out_at, cosine, sine, table_at, head_dim // 2, scale)


@kernel
def prepare_query(
    q, qi, qs, qn, row, x, x_at, norms, norm_at, eps, cosine, sine, table_at, head_dim, scale, fmt
):  # fmt: skip
    """Put a query head f32 [E] at ``x_at``, turned by its position and times ``scale``, into row ``row`` of the scratch."""
    wide = (head_dim + 31) // 32 * 32
    turned(q, row * wide, x, x_at, norms, norm_at, eps, cosine, sine, table_at, head_dim, scale)
    if fmt == CACHE_Q8_0:
        quantize(q, row * wide, wide, qi, row * wide, qs, qn, row * (wide // 32))


@kernel
def cache_key(keys, tile_at, lane, head_dim, fmt, q, qi, qs, qn, row):
    """Store the key f32 [E] in scratch row ``row`` as position ``lane`` of the tile at byte ``tile_at``."""
    wide = (head_dim + 31) // 32 * 32
    at = row * wide
    if fmt == CACHE_F32:
        for e in range(head_dim):
            store_scalar_f32(keys, tile_at + (e * W + lane) * 4, q[at + e])
    elif fmt == CACHE_F16:
        for e in range(head_dim):
            store_scalar_f16(keys, tile_at + (e * W + lane) * 2, q[at + e])
    else:
        blocks = wide // 32
        quantize(q, at, wide, qi, at, qs, qn, row * blocks)
        for e in range(head_dim):
            keys[tile_at + (e // 4 * W + lane) * 4 + e % 4] = np.uint8(np.int32(qi[at + e]) + Q8_BIAS)
        scales = tile_at + (head_dim + 3) // 4 * 4 * W
        for b in range(blocks):
            store_scalar_f16(keys, scales + (b * W + lane) * 2, qs[row * blocks + b])


@kernel
def cache_value(values, tile_at, lane, head_dim, fmt, q, qi, qs, qn, row):
    """Store the value f32 [E] in scratch row ``row`` as position ``lane`` of the tile at byte ``tile_at``."""
    wide, padded = (head_dim + 31) // 32 * 32, (head_dim + W - 1) // W * W
    at = row * wide
    if fmt == CACHE_F32:
        for e in range(0, padded, W):
            store_f32(values, tile_at + (lane * padded + e) * 4, load_f32(q, at + e))
    elif fmt == CACHE_F16:
        for e in range(0, padded, W):
            store_f16(values, tile_at + (lane * padded + e) * 2, load_f32(q, at + e))
    else:
        blocks = wide // 32
        quantize(q, at, wide, qi, at, qs, qn, row * blocks)
        for e in range(padded):
            values[tile_at + lane * padded + e] = np.uint8(qi[at + e])
        scales = tile_at + padded * W
        for b in range(blocks):
            store_scalar_f16(values, scales + (b * W + lane) * 2, qs[row * blocks + b])


@kernel
def cache_token(
    keys, key_at, key_tile, values, value_at, value_tile, fmt, position, head_dim,
    x, k_at, v_at, norms, norm_at, eps, cosine, sine, table_at, q, qi, qs, qn, row,
):  # fmt: skip
    """Store key (turned by its position) and value of one head at ``position``; its cache starts at the two byte offsets."""
    never_inline()
    wide = (head_dim + 31) // 32 * 32
    tile, lane = position // W, position % W
    turned(q, row * wide, x, k_at, norms, norm_at, eps, cosine, sine, table_at, head_dim, np.float32(1))
    cache_key(keys, key_at + tile * key_tile, lane, head_dim, fmt, q, qi, qs, qn, row)
    for e in range(head_dim):
        q[row * wide + e] = x[v_at + e]
    cache_value(values, value_at + tile * value_tile, lane, head_dim, fmt, q, qi, qs, qn, row)


@kernel
def soften(scores, at, count, parts, peak_at, sum_at):
    """Scores [count] from ``at`` on become exp(score - largest); the largest and the sum go to ``parts``."""
    tiles = (count + W - 1) // W
    for i in range(at + count, at + tiles * W):  # positions beyond the last hold rubbish
        scores[i] = np.float32(-np.inf)
    top = load_f32(scores, at)
    for t in range(1, tiles):
        top = maximum(top, load_f32(scores, at + t * W))
    peak = reduce_max(top)
    total = splat(np.float32(0))
    for t in range(tiles - 1):
        weight = exp(sub(load_f32(scores, at + t * W), splat(peak)))
        total = add(total, weight)
        store_f32(scores, at + t * W, weight)
    last = at + (tiles - 1) * W
    store_f32(scores, last, exp(sub(load_f32(scores, last), splat(peak))))
    parts[peak_at] = peak
    parts[sum_at] = reduce_add(add(total, load_f32(scores, last)))


@kernel
def attend(
    parts, part_at, chunk, length, keys, key_at, key_tile, values, value_at, value_tile, fmt, count, group, head_dim,
    q, qi, qs, qn, row, rows, scores,
):  # fmt: skip
    """Leave what chunk number ``chunk`` contributes to query rows ``row`` .. ``row + rows - 1`` in ``parts``.

    The rows are ``group`` to a token, of tokens that follow one another: the first sees ``count`` positions of the chunk, and
    each later one a position more, up to ``length``. What some of them see is read once for up to MAX_ROWS rows.

    Shapes:
        parts   row after row from ``part_at`` on
        keys    u8, the chunk's first tile at byte ``key_at``, ``key_tile`` bytes a tile; values likewise
        count   at least 1; cached contents that a row does not see have no influence on it
        scores  f32 [MAX_ROWS * (1 + B) * length] scratch
    """
    never_inline()
    padded, blocks = (head_dim + W - 1) // W * W, (head_dim + 31) // 32
    stride = row_stride(head_dim)
    columns = padded // W
    scaled = MAX_ROWS * length
    done = 0
    while done < rows:
        now = min(rows - done, MAX_ROWS)
        seen = min(length, count + done // group)  # by the first of these rows, which sees least
        tiles = (min(length, count + (done + now - 1) // group) + W - 1) // W
        score_rows(
            scores, length, keys, key_at, key_tile, tiles, head_dim, q, qi, qs, qn, row + done, now, fmt
        )  # fmt: skip
        first = part_at + done * stride
        for r in range(now):
            peak_at = first + r * stride + chunk
            soften(scores, r * length, min(length, count + (done + r) // group), parts, peak_at, peak_at + MAX_CHUNKS)
        w_at, w_stride, block_stride = 0, length, 0
        if fmt == CACHE_Q8_0:
            w_at, w_stride, block_stride = scaled, blocks * length, length
            for t in range(tiles):
                scales = value_at + t * value_tile + padded * W
                for b in range(blocks):
                    d = load_f16(values, scales + b * 2 * W)
                    for r in range(now):
                        to = scaled + (r * blocks + b) * length + t * W
                        store_f32(scores, to, mul(load_f32(scores, r * length + t * W), d))
        to = first + 2 * MAX_CHUNKS + chunk * padded
        for p in range(0, seen, MIX_POSITIONS):
            mix_rows(
                parts, to, stride, values, value_at, value_tile, p, min(p + MIX_POSITIONS, seen), columns,
                scores, w_at, w_stride, block_stride, now, fmt,
            )  # fmt: skip
        for r in range(now):
            more = min(length, count + (done + r) // group)
            if more > seen:
                mix_rows(
                    parts, to + r * stride, stride, values, value_at, value_tile, seen, more, columns,
                    scores, w_at + r * w_stride, w_stride, block_stride, 1, fmt,
                )  # fmt: skip
        done += now


@kernel
def combine(out, out_at, parts, part_at, chunks, head_dim, scratch):
    """Out = the attention of one query row: its ``chunks`` parts, weighted by exp(largest - largest of all), in order.

    Shapes: out f32, E values written at ``out_at``; scratch f32 [MAX_CHUNKS + W].
    """
    never_inline()
    padded = (head_dim + W - 1) // W * W
    whole = head_dim // W * W
    if chunks == 1:  # the general case to the bit: exp(0) is exactly 1
        inverse = splat(np.float32(1) / parts[part_at + MAX_CHUNKS])
        for e in range(0, whole, W):
            store_f32(out, out_at + e, mul(load_f32(parts, part_at + 2 * MAX_CHUNKS + e), inverse))
        if whole < head_dim:
            store_f32(scratch, 0, mul(load_f32(parts, part_at + 2 * MAX_CHUNKS + whole), inverse))
            for e in range(whole, head_dim):
                out[out_at + e] = scratch[e - whole]
        return
    for c in range(MAX_CHUNKS):
        scratch[c] = parts[part_at + c] if c < chunks else np.float32(-np.inf)
    top = load_f32(scratch, 0)
    for c in range(W, MAX_CHUNKS, W):
        top = maximum(top, load_f32(scratch, c))
    peak = splat(reduce_max(top))
    for c in range(0, MAX_CHUNKS, W):
        store_f32(scratch, c, exp(sub(load_f32(scratch, c), peak)))
    total = np.float32(0)
    for c in range(chunks):
        total += scratch[c] * parts[part_at + MAX_CHUNKS + c]
    inverse = splat(np.float32(1) / total)
    for e in range(0, padded, W):
        acc = splat(np.float32(0))
        for c in range(chunks):
            acc = fma(splat(scratch[c]), load_f32(parts, part_at + 2 * MAX_CHUNKS + c * padded + e), acc)
        if e < whole:
            store_f32(out, out_at + e, mul(acc, inverse))
        else:
            store_f32(scratch, MAX_CHUNKS, mul(acc, inverse))
    for e in range(whole, head_dim):
        out[out_at + e] = scratch[MAX_CHUNKS + e - whole]


@kernel
def attend_tokens(
    out, out_at, out_stride, parts, part_at, keys, key_at, key_tile, values, value_at, value_tile, fmt,
    position, tokens, group, head_dim, x, x_at, x_stride, norms, norm_at, eps, cosine, sine, table_at, table_step, scale,
    q, qi, qs, qn, scores,
):  # fmt: skip
    """Attention of the G heads of one key/value head for ``tokens`` tokens from ``position`` on, all of them cached already.

    Chunks that every one of them sees some of are passed over by all their rows; the last ones by each token's alone.
    """
    never_inline()
    stride = row_stride(head_dim)
    first_row = tokens - tokens  # 0, but no literal: Numba would compile attend once more for one
    for m in range(tokens):
        for g in range(group):
            at = x_at + m * x_stride + g * head_dim
            prepare_query(
                q, qi, qs, qn, m * group + g, x, at, norms, norm_at, eps,
                cosine, sine, table_at + m * table_step, head_dim, scale, fmt,
            )  # fmt: skip
    length = chunk_length(position + 1)
    shared = (position + length) // length if chunk_length(position + tokens) == length else 0
    for c in range(shared):
        tile = c * length // W
        attend(
            parts, part_at, c, length, keys, key_at + tile * key_tile, key_tile, values, value_at + tile * value_tile,
            value_tile, fmt, position + 1 - c * length, group, head_dim, q, qi, qs, qn, first_row, tokens * group, scores,
        )  # fmt: skip
    for m in range(tokens):
        positions = position + m + 1
        length = chunk_length(positions)
        chunks = (positions + length - 1) // length
        for c in range(shared, chunks):
            tile = c * length // W
            attend(
                parts, part_at + m * group * stride, c, length, keys, key_at + tile * key_tile, key_tile, values,
                value_at + tile * value_tile, value_tile, fmt, positions - c * length, group, head_dim,
                q, qi, qs, qn, m * group, group, scores,
            )  # fmt: skip
        for g in range(group):
            to, from_ = out_at + m * out_stride + g * head_dim, part_at + (m * group + g) * stride
            combine(out, to, parts, from_, chunks, head_dim, scores)
