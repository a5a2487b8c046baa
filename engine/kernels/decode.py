"""Tokens through all blocks, on persistent threads: the function that is timed when a shape is measured.

Every thread runs :func:`run_tokens` with its own ``tid``. Rows of each product, and heads of attention, are split among threads
in fixed ranges, columns never, so the bits do not depend on their number; nor on how many tokens go in together. One
token needs five barriers a block: each thread normalises and quantises the token for itself, and the thread that attends to
the newest position caches it. Several tokens are divided for that, at four barriers more. What goes into the last product of
a block is quantised by the threads that computed it, so their shares of it are whole blocks of 32.

A job may leave some of the threads out: each has a job counter of its own, and those left out sleep on.

    N threads of this job   M tokens given now, at most ROWS   D hidden size   H, K query and key/value heads   E head dim
    F MLP width   V vocabulary   P context padded to W   S widest row   Dp, Ep ...  padded to W   G = H / K
    R rows of attention scratch, see ``attention.py``         B = E / 32 rounded up

The plan, made by ``engine/plan.py``:
    ints   i64   see the index names below
    ops    i64   [blocks * 7 + 2, 5]   (format, data offset, scale offset, tiles, columns) of q k v o gate up down per block,
                 then embedding and head
    norms  f32   [blocks * 2 + 1, Dp]  attention norm and MLP norm per block, then the final norm; behind them
                 [blocks, (HE)p + 2 (KE)p + 2 Ep]  biases of q k v, then the norms of a query and of a key head
    A block without a gate has its one inner product in the gate's place and none in that of up.
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.attention import (
    ROWS_TOGETHER,
    attend,
    attend_tokens,
    cache_token,
    chunk_length,
    combine,
    prepare_query,
    row_stride,
)
from deepthin.engine.kernels.elementwise import add_rows, gelu, quantize, relu2, rms_norm, swiglu
from deepthin.engine.kernels.matmul import matmul
from deepthin.engine.kernels.matvec import Q8_0
from deepthin.engine.kernels.rows import read_row
from deepthin.engine.kernels.sync import JOB, JOB_PARKED, STOP, barrier, publish, thread_word, wait_while
from deepthin.engine.simd import W, atomic_exchange, atomic_load, read_cycles

# indices into ``ints``
NUM_BLOCKS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, CONTEXT = range(8)
NUM_TOKENS, POSITION, LOGITS, SPIN, IDLE_SPIN, WIDEST = range(8, 14)
MLP, QK_NORM, QKV_BIAS, NOPE_EVERY, RUNS = range(14, 19)
CACHE_FORMAT, KEY_TILE, VALUE_TILE, ACTIVE = range(19, 23)
NUM_INTS = 23
SWIGLU, GELU, RELU2 = range(3)  # ints[MLP], as MLP_KINDS of engine/shape.py has them
ROWS = 32  # most tokens that go through the blocks together
UNIT = 32 // W  # tiles whose rows are a block of 32
LOGITS_NONE, LOGITS_LAST, LOGITS_ALL = range(3)
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
OPS_PER_BLOCK = 7


@kernel
def _split(n, tid, num_threads):
    """Part ``tid`` of 0..n-1 cut into ``num_threads`` ranges."""
    return n * tid // num_threads, n * (tid + 1) // num_threads


@kernel
def run_tokens(
    tid, num_threads, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
    x, qkv, mixed, gate, up, logits, keys, values,
    normed, xq, xs, xn, parts, all_scores, all_q, all_qi, all_qs, all_qn, stamps,
):  # fmt: skip
    """Append ``ints[NUM_TOKENS]`` = M tokens at ``ints[POSITION]`` and leave logits as ``ints[LOGITS]`` asks.

    Shapes:
        tokens i64 [ROWS]              arena u8, packed weights      cosine, sine f32 [(P + 1) * E / 2]
        x f32 [ROWS * Dp] residual     qkv f32 [ROWS * (HEp + 2 KEp)]        up, gate f32 [ROWS * S]
        mixed f32 [max(N, ROWS) * S]
        logits f32 [ROWS * Vp], or [Vp] for the last token only
        keys, values u8 [blocks * K * P / W tiles]
        normed f32 [max(N, ROWS) * S]
        xq i8 [(max(N, ROWS) + ROWS) * S]     xs f32, xn i32 [(max(N, ROWS) + ROWS) * (S / 32)]
        parts f32 [(H + N R) * row]    all_scores f32 [N, scratch of attend and combine]
        all_q f32, all_qi i8 [N, (R + 1) * 32 B]   all_qs f32, all_qn i32 [N, (R + 1) * B]
        stamps i64 [blocks + 3] cycle counts
    """
    blocks, hidden, heads, kv_heads = ints[NUM_BLOCKS], ints[HIDDEN], ints[HEADS], ints[KV_HEADS]
    head_dim, context, spin, start = ints[HEAD_DIM], ints[CONTEXT], ints[SPIN], ints[POSITION]
    # read before the first barrier: once thread 0 has left the last one, it may set up the next job while others lag
    count, wide, wanted = ints[NUM_TOKENS], ints[WIDEST], ints[LOGITS]
    zero = tid - tid  # 0, but no literal: Numba would compile a callee once more for one
    half = head_dim // 2
    group = heads // kv_heads
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    k_at = (q_size + W - 1) // W * W
    v_at = k_at + (kv_size + W - 1) // W * W
    qkv_stride = v_at + (kv_size + W - 1) // W * W
    head_padded = (head_dim + W - 1) // W * W
    hidden_padded = (hidden + W - 1) // W * W
    vocab_padded = (ints[VOCAB] + W - 1) // W * W
    s_stride = wide // 32
    mlp, has_head_norms, biased, nope_every = ints[MLP], ints[QK_NORM] != 0, ints[QKV_BIAS] != 0, ints[NOPE_EVERY]
    key_scale = np.float32(1.0 / np.sqrt(np.float64(head_dim)))
    cache_format, key_tile, value_tile = ints[CACHE_FORMAT], ints[KEY_TILE], ints[VALUE_TILE]
    scores, q, qi, qs, qn = all_scores[tid], all_q[tid], all_qi[tid], all_qs[tid], all_qn[tid]
    part_row, scratch_rows = row_stride(head_dim), max(ROWS_TOGETHER, group)
    own_parts = (heads + tid * scratch_rows) * part_row
    length = chunk_length(start + 1)
    chunks = (start + length) // length
    together = max(1, min(ROWS_TOGETHER // group, count * kv_heads // (2 * num_threads)))  # tokens that attend as one
    bundles = (count + together - 1) // together
    # one token: every thread prepares it in a row of its own; several: each thread prepares its share, and all wait
    alone = count == 1
    base = tid if alone else 0
    m0, m1 = _split(count, tid, num_threads)
    n0, n1 = (0, 1) if alone else (m0, m1)
    rows, codes = base * wide, base * s_stride
    inner = max(num_threads, ROWS)  # first of the rows that hold the codes of the MLP's inner values
    unit0, unit1 = _split(kv_heads * chunks, tid, num_threads)
    kv_unit0, kv_unit1 = _split(count * kv_heads, tid, num_threads)

    if tid == 0:
        stamps[0] = read_cycles()
    for m in range(m0, m1):
        read_row(x, m * hidden_padded, arena, ops, blocks * OPS_PER_BLOCK, tokens[m])
    barrier(ctl, tid, num_threads, spin)
    if tid == 0:
        stamps[1] = read_cycles()

    for block in range(blocks):
        at = block * OPS_PER_BLOCK
        cache_at = block * kv_heads * context
        vectors = (2 * blocks + 1) * hidden_padded + block * (qkv_stride + 2 * head_padded)
        turns = nope_every == 0 or (block // ints[RUNS] + 1) % nope_every != 0
        turn, turn_step = (start * half, half) if turns else (context * half, zero)  # into the tables, per token
        q_norm = vectors + qkv_stride if has_head_norms else zero - 1
        k_norm = vectors + qkv_stride + head_padded if has_head_norms else zero - 1

        coded = max(ops[at + Q, 0], ops[at + K, 0], ops[at + V, 0]) >= Q8_0
        for m in range(n0, n1):
            rms_norm(normed, rows + m * wide, x, m * hidden_padded, norms, 2 * block * hidden_padded, hidden, eps)
            if coded:
                quantize(normed, rows + m * wide, hidden, xq, rows + m * wide, xs, xn, codes + m * s_stride)
        if not alone:
            barrier(ctl, tid, num_threads, spin)
        for j in range(3):
            to = 0 if j == 0 else (k_at if j == 1 else v_at)
            t0, t1 = _split(ops[at + j, 3], tid, num_threads)
            matmul(
                qkv, zero + to, qkv_stride, arena, ops, at + j,
                normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1,
            )  # fmt: skip
            if biased:
                for m in range(count):
                    add_rows(qkv, m * qkv_stride + to + t0 * W, norms, vectors + to + t0 * W, (t1 - t0) * W)
        barrier(ctl, tid, num_threads, spin)

        if alone:  # a key/value head's newest position is needed only by the thread that has its last chunk
            ready = -1
            for unit in range(unit0, unit1):
                h, c = unit // chunks, unit % chunks
                key_at, value_at = (cache_at + h * context) // W * key_tile, (cache_at + h * context) // W * value_tile
                if h != ready:
                    for g in range(group):
                        prepare_query(
                            q, qi, qs, qn, g, qkv, (h * group + g) * head_dim,
                            norms, q_norm, eps, cosine, sine, turn, head_dim, key_scale, cache_format,
                        )  # fmt: skip
                    ready = h
                if c == chunks - 1:
                    cache_token(
                        keys, key_at, key_tile, values, value_at, value_tile, cache_format, start, head_dim,
                        qkv, k_at + h * head_dim, v_at + h * head_dim,
                        norms, k_norm, eps, cosine, sine, turn, q, qi, qs, qn, scratch_rows,
                    )  # fmt: skip
                tile = c * length // W
                attend(
                    parts, h * group * part_row, c, length, keys, key_at + tile * key_tile, key_tile,
                    values, value_at + tile * value_tile, value_tile, cache_format,
                    start + 1 - c * length, group, head_dim, q, qi, qs, qn, zero, group, scores,
                )  # fmt: skip
            barrier(ctl, tid, num_threads, spin)
            for h in range(heads):
                combine(mixed, rows + h * head_dim, parts, h * part_row, chunks, head_dim, scores)
        else:
            for unit in range(kv_unit0, kv_unit1):
                m, h = unit // kv_heads, unit % kv_heads
                from_, tile = m * qkv_stride + h * head_dim, (cache_at + h * context) // W
                cache_token(
                    keys, tile * key_tile, key_tile, values, tile * value_tile, value_tile, cache_format, start + m, head_dim,
                    qkv, from_ + k_at, from_ + v_at, norms, k_norm, eps, cosine, sine, turn + m * turn_step,
                    q, qi, qs, qn, scratch_rows,
                )  # fmt: skip
            barrier(ctl, tid, num_threads, spin)
            for unit in range(tid, kv_heads * bundles, num_threads):  # in turns, since later tokens see more
                m, h = unit // kv_heads * together, unit % kv_heads
                from_, tile = m * qkv_stride + h * group * head_dim, (cache_at + h * context) // W
                attend_tokens(
                    mixed, m * wide + h * group * head_dim, wide, parts, own_parts,
                    keys, tile * key_tile, key_tile, values, tile * value_tile, value_tile, cache_format,
                    start + m, min(together, count - m), group, head_dim, qkv, from_, qkv_stride,
                    norms, q_norm, eps, cosine, sine, turn + m * turn_step, turn_step, key_scale, q, qi, qs, qn, scores,
                )  # fmt: skip
            barrier(ctl, tid, num_threads, spin)

        if ops[at + O, 0] >= Q8_0:
            for m in range(n0, n1):
                quantize(mixed, rows + m * wide, q_size, xq, rows + m * wide, xs, xn, codes + m * s_stride)
            if not alone:
                barrier(ctl, tid, num_threads, spin)
        t0, t1 = _split(ops[at + O, 3], tid, num_threads)
        matmul(
            up, zero, wide, arena, ops, at + O, mixed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
        )  # fmt: skip
        for m in range(count):
            add_rows(x, m * hidden_padded + t0 * W, up, m * wide + t0 * W, (t1 - t0) * W)
        barrier(ctl, tid, num_threads, spin)

        coded = max(ops[at + GATE, 0], ops[at + UP, 0]) >= Q8_0
        for m in range(n0, n1):
            rms_norm(normed, rows + m * wide, x, m * hidden_padded, norms, (2 * block + 1) * hidden_padded, hidden, eps)
            if coded:
                quantize(normed, rows + m * wide, hidden, xq, rows + m * wide, xs, xn, codes + m * s_stride)
        if not alone:
            barrier(ctl, tid, num_threads, spin)
        tiles = ops[at + GATE, 3]
        t0, t1 = _split((tiles + UNIT - 1) // UNIT, tid, num_threads)
        t0, t1 = min(t0 * UNIT, tiles), min(t1 * UNIT, tiles)
        matmul(
            gate, zero, wide, arena, ops, at + GATE, normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
        )  # fmt: skip
        if mlp == SWIGLU:
            matmul(
                up, zero, wide, arena, ops, at + UP, normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
            )  # fmt: skip
        for m in range(count):
            if mlp == SWIGLU:
                swiglu(gate, up, m * wide + t0 * W, m * wide + t1 * W)
            elif mlp == RELU2:
                relu2(gate, m * wide + t0 * W, m * wide + t1 * W)
            else:
                gelu(gate, m * wide + t0 * W, m * wide + t1 * W)
            if ops[at + DOWN, 0] >= Q8_0:
                at_row, at_code = (inner + m) * wide + t0 * W, (inner + m) * s_stride + t0 // UNIT
                quantize(gate, m * wide + t0 * W, (t1 - t0) * W, xq, at_row, xs, xn, at_code)
        barrier(ctl, tid, num_threads, spin)

        t0, t1 = _split(ops[at + DOWN, 3], tid, num_threads)
        matmul(
            mixed, zero, wide, arena, ops, at + DOWN,
            gate, zero, wide, xq, inner * wide, wide, xs, xn, inner * s_stride, s_stride, count, t0, t1,
        )  # fmt: skip
        for m in range(count):
            add_rows(x, m * hidden_padded + t0 * W, mixed, m * wide + t0 * W, (t1 - t0) * W)
        barrier(ctl, tid, num_threads, spin)
        if tid == 0:
            stamps[2 + block] = read_cycles()

    if wanted != LOGITS_NONE:
        at = blocks * OPS_PER_BLOCK + 1
        first = 0 if wanted == LOGITS_ALL else count - 1
        asked = count - first
        if asked == 1:  # prepared by every thread for itself
            rows, codes, n0, n1 = tid * wide, tid * s_stride, 0, 1
        for m in range(n0, n1):
            rms_norm(normed, rows + m * wide, x, (first + m) * hidden_padded, norms, 2 * blocks * hidden_padded, hidden, eps)
            if ops[at, 0] >= Q8_0:
                quantize(normed, rows + m * wide, hidden, xq, rows + m * wide, xs, xn, codes + m * s_stride)
        if asked > 1:
            barrier(ctl, tid, num_threads, spin)
        t0, t1 = _split(ops[at, 3], tid, num_threads)
        matmul(
            logits, zero, vocab_padded, arena, ops, at,
            normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, asked, t0, t1,
        )  # fmt: skip
        barrier(ctl, tid, num_threads, spin)
        if tid == 0:
            stamps[2 + blocks] = read_cycles()


@kernel
def publish_job(ctl, tid):
    """Tell thread ``tid`` that there is a job for it."""
    job = thread_word(tid, JOB)
    publish(ctl, job, thread_word(tid, JOB_PARKED), np.int32(atomic_load(ctl, job) + 1))


@kernel
def work(
    tid, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
    x, qkv, mixed, gate, up, logits, keys, values,
    normed, xq, xs, xn, parts, all_scores, all_q, all_qi, all_qs, all_qn, stamps,
):  # fmt: skip
    """Thread 0 publishes one job, takes part and returns when all are done; the others run jobs until told to stop.

    A job is for threads 0 .. ``ints[ACTIVE]`` - 1. One function for both roles, because Numba would compile the whole of
    :func:`run_tokens` again for a second one.
    """
    seen = np.int32(0)
    job, parked = thread_word(tid, JOB), thread_word(tid, JOB_PARKED)
    while True:
        if tid != 0:
            wait_while(ctl, job, parked, seen, ints[IDLE_SPIN])
            if atomic_load(ctl, STOP) != 0:
                return
            seen = np.int32(seen + 1)
        active = ints[ACTIVE]
        if tid == 0:
            for other in range(1, active):
                publish_job(ctl, other)
        run_tokens(
            tid, active, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
            x, qkv, mixed, gate, up, logits, keys, values,
            normed, xq, xs, xn, parts, all_scores, all_q, all_qi, all_qs, all_qn, stamps,
        )  # fmt: skip
        if tid == 0:
            return


@kernel
def stop_workers(ctl, num_threads):
    """Make every worker of ``num_threads`` threads return from :func:`work`."""
    atomic_exchange(ctl, STOP, np.int32(1))
    for tid in range(1, num_threads):
        publish_job(ctl, tid)
