"""Tokens through all blocks, on persistent threads: the function that is timed when a shape is measured.

Every thread runs :func:`run_tokens` with its own ``tid``. Rows of each product, and heads of attention, are split among threads
in fixed ranges, columns never, so the bits do not depend on their number; nor on how many tokens go in together. One
token needs six barriers a block: each thread normalises and quantises the token for itself. Several tokens are divided
for that, at four barriers more.

    N threads   M tokens given now, at most ROWS   D hidden size   H, K query and key/value heads   E head dim   F MLP width
    V vocabulary   P context padded to W   S widest row   Dp, Ep ...  padded to W

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
from deepthin.engine.kernels.attention import attend
from deepthin.engine.kernels.elementwise import add_rows, gelu, head_norm, quantize, relu2, rms_norm, rotate, swiglu
from deepthin.engine.kernels.matmul import matmul
from deepthin.engine.kernels.matvec import Q8_0
from deepthin.engine.kernels.rows import read_row
from deepthin.engine.kernels.sync import JOB, JOB_PARKED, STOP, barrier, publish, wait_while
from deepthin.engine.simd import W, atomic_load, read_cycles

# indices into ``ints``
NUM_BLOCKS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, CONTEXT = range(8)
NUM_TOKENS, POSITION, LOGITS, SPIN, IDLE_SPIN, WIDEST = range(8, 14)
MLP, QK_NORM, QKV_BIAS, NOPE_EVERY, RUNS = range(14, 19)
NUM_INTS = 19
SWIGLU, GELU, RELU2 = range(3)  # ints[MLP], as MLP_KINDS of engine/shape.py has them
ROWS = 32  # most tokens that go through the blocks together
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
    normed, xq, xs, xn, all_scores, all_head, stamps,
):  # fmt: skip
    """Append ``ints[NUM_TOKENS]`` = M tokens at ``ints[POSITION]`` and leave logits as ``ints[LOGITS]`` asks.

    Shapes:
        tokens i64 [ROWS]              arena u8, packed weights      cosine, sine f32 [(P + 1) * E / 2]
        x f32 [ROWS * Dp] residual     qkv f32 [ROWS * (HEp + 2 KEp)]        mixed, up f32 [ROWS * S]   gate f32 [ROWS * S]
        logits f32 [ROWS * Vp], or [Vp] for the last token only
        keys f32 [blocks * K * P * E]  values f32 [blocks * K * P * Ep]
        normed f32, xq i8 [max(N, ROWS) * S]     xs f32, xn i32 [max(N, ROWS) * (S / 32)]
        all_scores f32 [N, P]          all_head f32 [N, 2 Ep]        stamps i64 [blocks + 3] cycle counts
    """
    blocks, hidden, heads, kv_heads = ints[NUM_BLOCKS], ints[HIDDEN], ints[HEADS], ints[KV_HEADS]
    head_dim, context, spin, start = ints[HEAD_DIM], ints[CONTEXT], ints[SPIN], ints[POSITION]
    # read before the first barrier: once thread 0 has left the last one, it may set up the next job while others lag
    count, wide, wanted = ints[NUM_TOKENS], ints[WIDEST], ints[LOGITS]
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
    scores, head = all_scores[tid], all_head[tid]
    # one token: every thread prepares it in a row of its own; several: each thread prepares its share, and all wait
    alone = count == 1
    base = tid if alone else 0
    m0, m1 = _split(count, tid, num_threads)
    n0, n1 = (0, 1) if alone else (m0, m1)
    rows, codes = base * wide, base * s_stride
    unit0, unit1 = _split(count * heads, tid, num_threads)
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
                qkv, to, qkv_stride, arena, ops, at + j,
                normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1,
            )  # fmt: skip
            if biased:
                for m in range(count):
                    add_rows(qkv, m * qkv_stride + to + t0 * W, norms, vectors + to + t0 * W, (t1 - t0) * W)
        barrier(ctl, tid, num_threads, spin)

        for unit in range(kv_unit0, kv_unit1):
            m, h = unit // kv_heads, unit % kv_heads
            position, from_ = start + m, m * qkv_stride + h * head_dim
            turn = (position if turns else context) * half
            if has_head_norms:
                head_norm(head, 0, qkv, from_ + k_at, norms, vectors + qkv_stride + head_padded, head_dim, eps)
                rotate(head, 0, head, 0, cosine, sine, turn, half, np.float32(1))
            else:
                rotate(head, 0, qkv, from_ + k_at, cosine, sine, turn, half, np.float32(1))
            tile = (cache_at + h * context) * head_dim + position // W * W * head_dim + position % W
            slot = (cache_at + h * context + position) * head_padded
            for e in range(head_dim):
                keys[tile + e * W] = head[e]
                values[slot + e] = qkv[from_ + v_at + e]
        barrier(ctl, tid, num_threads, spin)

        for unit in range(unit0, unit1):
            m, h = unit // heads, unit % heads
            position = start + m
            turn = (position if turns else context) * half
            if has_head_norms:
                head_norm(head, 0, qkv, m * qkv_stride + h * head_dim, norms, vectors + qkv_stride, head_dim, eps)
                rotate(head, 0, head, 0, cosine, sine, turn, half, key_scale)
            else:
                rotate(head, 0, qkv, m * qkv_stride + h * head_dim, cosine, sine, turn, half, key_scale)
            kv_at = cache_at + h // group * context
            attend(
                mixed, m * wide + h * head_dim, head, keys, kv_at * head_dim, values, kv_at * head_padded,
                position + 1, head_dim, scores, head_padded,
            )  # fmt: skip
        barrier(ctl, tid, num_threads, spin)

        if ops[at + O, 0] >= Q8_0:
            for m in range(n0, n1):
                quantize(mixed, m * wide, q_size, xq, rows + m * wide, xs, xn, codes + m * s_stride)
            if not alone:
                barrier(ctl, tid, num_threads, spin)
        t0, t1 = _split(ops[at + O, 3], tid, num_threads)
        matmul(
            up, 0, wide, arena, ops, at + O, mixed, 0, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
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
        t0, t1 = _split(ops[at + GATE, 3], tid, num_threads)
        matmul(
            gate, 0, wide, arena, ops, at + GATE, normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
        )  # fmt: skip
        if mlp == SWIGLU:
            matmul(
                up, 0, wide, arena, ops, at + UP, normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
            )  # fmt: skip
        for m in range(count):
            if mlp == SWIGLU:
                swiglu(gate, up, m * wide + t0 * W, m * wide + t1 * W)
            elif mlp == RELU2:
                relu2(gate, m * wide + t0 * W, m * wide + t1 * W)
            else:
                gelu(gate, m * wide + t0 * W, m * wide + t1 * W)
        barrier(ctl, tid, num_threads, spin)

        if ops[at + DOWN, 0] >= Q8_0:
            for m in range(n0, n1):
                quantize(gate, m * wide, ints[INNER], xq, rows + m * wide, xs, xn, codes + m * s_stride)
            if not alone:
                barrier(ctl, tid, num_threads, spin)
        t0, t1 = _split(ops[at + DOWN, 3], tid, num_threads)
        matmul(
            mixed, 0, wide, arena, ops, at + DOWN, gate, 0, wide, xq, rows, wide, xs, xn, codes, s_stride, count, t0, t1
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
            logits, 0, vocab_padded, arena, ops, at, normed, rows, wide, xq, rows, wide, xs, xn, codes, s_stride, asked, t0, t1
        )  # fmt: skip
        barrier(ctl, tid, num_threads, spin)
        if tid == 0:
            stamps[2 + blocks] = read_cycles()


@kernel
def work(
    tid, num_threads, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
    x, qkv, mixed, gate, up, logits, keys, values,
    normed, xq, xs, xn, all_scores, all_head, stamps,
):  # fmt: skip
    """Thread 0 publishes one job, takes part and returns when all are done; the others run jobs until told to stop.

    One function for both roles, because Numba would compile the whole of :func:`run_tokens` again for a second one.
    """
    seen = np.int32(0)
    while True:
        if tid != 0:
            wait_while(ctl, JOB, JOB_PARKED, seen, ints[IDLE_SPIN])
            if atomic_load(ctl, STOP) != 0:
                return
            seen = np.int32(seen + 1)
        elif num_threads > 1:
            publish(ctl, JOB, JOB_PARKED, np.int32(atomic_load(ctl, JOB) + 1))
        run_tokens(
            tid, num_threads, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
            x, qkv, mixed, gate, up, logits, keys, values,
            normed, xq, xs, xn, all_scores, all_head, stamps,
        )  # fmt: skip
        if tid == 0:
            return


@kernel
def stop_workers(ctl):
    """Make every worker return from :func:`work`."""
    publish(ctl, STOP, JOB_PARKED, np.int32(1))
    publish(ctl, JOB, JOB_PARKED, np.int32(atomic_load(ctl, JOB) + 1))
