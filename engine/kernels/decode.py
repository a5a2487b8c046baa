"""One token through all blocks, on persistent threads: the function that is timed when a shape is measured.

Every thread runs :func:`run_tokens` with its own ``tid``; rows of each product and heads of attention are split among
threads in fixed ranges, columns never, so the bits do not depend on their number. Six barriers a block.

    N threads   D hidden size   H, K query and key/value heads   E head dim   F MLP width   P context padded to W
    Dp, Ep ...  the same, padded to W

The plan, made by ``engine/plan.py``:
    ints   i64   see the index names below
    ops    i64   [blocks * 7 + 2, 5]   (format, data offset, scale offset, tiles, columns) of q k v o gate up down per block,
                 then embedding and head
    norms  f32   [blocks * 2 + 1, Dp]  attention norm and MLP norm per block, then the final norm
"""

from __future__ import annotations

import numpy as np

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.attention import attend
from deepthin.engine.kernels.elementwise import add_rows, quantize, rms_norm, rotate, swiglu
from deepthin.engine.kernels.matvec import Q8_0, matvec, read_row
from deepthin.engine.kernels.sync import JOB, JOB_PARKED, STOP, barrier, publish, wait_while
from deepthin.engine.simd import W, atomic_load, read_cycles

# indices into ``ints``
NUM_BLOCKS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, CONTEXT, NUM_TOKENS, POSITION, LOGITS, SPIN, IDLE_SPIN = range(13)
NUM_INTS = 13
LOGITS_NONE, LOGITS_LAST, LOGITS_ALL = range(3)
Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741
OPS_PER_BLOCK = 7


@kernel
def _split(n, tid, num_threads):
    """Part ``tid`` of 0..n-1 cut into ``num_threads`` ranges."""
    return n * tid // num_threads, n * (tid + 1) // num_threads


@kernel
def _product(out, out_at, arena, ops, i, x, xq, xs, xn, tid, num_threads):
    """This thread's rows of one product; returns their range within ``out`` (from ``out_at``), in values."""
    t0, t1 = _split(ops[i, 3], tid, num_threads)
    matvec(out, out_at, arena, ops, i, x, xq, xs, xn, t0, t1)
    return t0 * W, t1 * W


@kernel
def run_tokens(
    tid, num_threads, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
    x, qkv, mixed, gate, up, logits, keys, values,
    all_row, all_xq, all_xs, all_xn, all_scores, all_head, stamps,
):  # fmt: skip
    """Append ``ints[NUM_TOKENS]`` tokens at ``ints[POSITION]`` and leave logits as ``ints[LOGITS]`` asks.

    Shapes:
        tokens i64 [>= NUM_TOKENS]     arena u8, packed weights      cosine, sine f32 [P * E / 2]
        x f32 [Dp] residual            qkv f32 [HEp + 2 KEp]         mixed f32 [max(HEp, Dp)]   gate, up f32 [Fp]
        logits f32 [rows * Vp]         keys f32 [blocks * K * P * E] values f32 [blocks * K * P * Ep]
        all_*  one row of scratch a thread                           stamps i64 [blocks + 3] cycle counts of the last token
    """
    blocks, hidden, heads, kv_heads = ints[NUM_BLOCKS], ints[HIDDEN], ints[HEADS], ints[KV_HEADS]
    head_dim, context, spin = ints[HEAD_DIM], ints[CONTEXT], ints[SPIN]
    half = head_dim // 2
    group = heads // kv_heads
    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    k_at = (q_size + W - 1) // W * W
    v_at = k_at + (kv_size + W - 1) // W * W
    head_padded = (head_dim + W - 1) // W * W
    norm_stride = (hidden + W - 1) // W * W
    vocab_padded = (ints[VOCAB] + W - 1) // W * W
    key_scale = np.float32(1.0 / np.sqrt(np.float64(head_dim)))
    row, xq, xs, xn = all_row[tid], all_xq[tid], all_xs[tid], all_xn[tid]
    scores, head = all_scores[tid], all_head[tid]
    head0, head1 = _split(heads, tid, num_threads)
    kv0, kv1 = _split(kv_heads, tid, num_threads)

    for s in range(ints[NUM_TOKENS]):
        position = ints[POSITION] + s
        if tid == 0:
            stamps[0] = read_cycles()
            read_row(x, arena, ops, blocks * OPS_PER_BLOCK, tokens[s])
        barrier(ctl, num_threads, spin)
        if tid == 0:
            stamps[1] = read_cycles()

        for block in range(blocks):
            at = block * OPS_PER_BLOCK
            cache_at = block * kv_heads * context

            rms_norm(row, x, norms, 2 * block * norm_stride, hidden, eps)
            if max(ops[at + Q, 0], ops[at + K, 0], ops[at + V, 0]) >= Q8_0:
                quantize(row, hidden, xq, xs, xn)
            _product(qkv, 0, arena, ops, at + Q, row, xq, xs, xn, tid, num_threads)
            _product(qkv, k_at, arena, ops, at + K, row, xq, xs, xn, tid, num_threads)
            _product(qkv, v_at, arena, ops, at + V, row, xq, xs, xn, tid, num_threads)
            barrier(ctl, num_threads, spin)

            for h in range(kv0, kv1):
                rotate(head, 0, qkv, k_at + h * head_dim, cosine, sine, position * half, half, np.float32(1))
                tile = (cache_at + h * context) * head_dim + position // W * W * head_dim + position % W
                slot = (cache_at + h * context + position) * head_padded
                for e in range(head_dim):
                    keys[tile + e * W] = head[e]
                    values[slot + e] = qkv[v_at + h * head_dim + e]
            barrier(ctl, num_threads, spin)

            for h in range(head0, head1):
                rotate(head, 0, qkv, h * head_dim, cosine, sine, position * half, half, key_scale)
                kv_at = cache_at + h // group * context
                attend(
                    mixed, h * head_dim, head, keys, kv_at * head_dim, values, kv_at * head_padded,
                    position + 1, head_dim, scores, row,
                )  # fmt: skip
            barrier(ctl, num_threads, spin)

            if ops[at + O, 0] >= Q8_0:
                quantize(mixed, q_size, xq, xs, xn)
            r0, r1 = _product(up, 0, arena, ops, at + O, mixed, xq, xs, xn, tid, num_threads)
            add_rows(x, up, r0, r1)
            barrier(ctl, num_threads, spin)

            rms_norm(row, x, norms, (2 * block + 1) * norm_stride, hidden, eps)
            if max(ops[at + GATE, 0], ops[at + UP, 0]) >= Q8_0:
                quantize(row, hidden, xq, xs, xn)
            _product(gate, 0, arena, ops, at + GATE, row, xq, xs, xn, tid, num_threads)
            r0, r1 = _product(up, 0, arena, ops, at + UP, row, xq, xs, xn, tid, num_threads)
            swiglu(gate, up, r0, r1)
            barrier(ctl, num_threads, spin)

            if ops[at + DOWN, 0] >= Q8_0:
                quantize(gate, ints[INNER], xq, xs, xn)
            r0, r1 = _product(mixed, 0, arena, ops, at + DOWN, gate, xq, xs, xn, tid, num_threads)
            add_rows(x, mixed, r0, r1)
            barrier(ctl, num_threads, spin)
            if tid == 0:
                stamps[2 + block] = read_cycles()

        if ints[LOGITS] == LOGITS_ALL or (ints[LOGITS] == LOGITS_LAST and s == ints[NUM_TOKENS] - 1):
            head_at = blocks * OPS_PER_BLOCK + 1
            rms_norm(row, x, norms, 2 * blocks * norm_stride, hidden, eps)
            if ops[head_at, 0] >= Q8_0:
                quantize(row, hidden, xq, xs, xn)
            out_at = s * vocab_padded if ints[LOGITS] == LOGITS_ALL else 0
            _product(logits, out_at, arena, ops, head_at, row, xq, xs, xn, tid, num_threads)
            barrier(ctl, num_threads, spin)
            if tid == 0:
                stamps[2 + blocks] = read_cycles()


@kernel
def work(
    tid, num_threads, ctl, ints, eps, tokens, ops, arena, norms, cosine, sine,
    x, qkv, mixed, gate, up, logits, keys, values,
    all_row, all_xq, all_xs, all_xn, all_scores, all_head, stamps,
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
            all_row, all_xq, all_xs, all_xn, all_scores, all_head, stamps,
        )  # fmt: skip
        if tid == 0:
            return


@kernel
def stop_workers(ctl):
    """Make every worker return from :func:`work`."""
    publish(ctl, STOP, JOB_PARKED, np.int32(1))
    publish(ctl, JOB, JOB_PARKED, np.int32(atomic_load(ctl, JOB) + 1))
