"""Inner loops of attention, emitted whole: each cached vector is loaded and widened once for up to four query rows.

    W lanes    E head dim    R rows that share the cache, 1..4    P positions, in tiles of W

A kernel cannot hold a list of vector registers, so it would spell out every number of rows; here lists of LLVM values do it
while code is generated, for each row count and cache format, and a call picks one by two comparisons.

Every row's sums run in one order whatever R is: scores over components, values over positions. How many tiles or columns are
summed at once follows from R and the number of registers; what is left over is done in halves.

Layout of a cache tile, sizes in bytes (made by ``engine/kernels/attention.py``):
    keys    f32, f16   [E][W]
            q8_0       [E / 4 rounded up][W][4] codes + bias, then f16 scales [E / 32 rounded up][W]
    values  f32, f16   [W][E padded]
            q8_0       [W][E padded] codes, then f16 scales [E / 32 rounded up][W]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from deepthin.engine.simd._ir import FLOAT, HALF, I8, I16, I32, I64, Vec, call, constant, intrinsic, pointer, splat, vector
from deepthin.engine.simd.vectors import f16_to_f32

MAX_ROWS = 4
# The cache is asked for this far ahead: a line of it holds so much work that the CPU's own guesses come late. Measured on
# Zen 4, depth 4096: q8_0 9.4 -> 7.9 ms a token on one thread; f32 becomes slower. On Zen 2, 512 positions in f16 from memory
# for three query rows: 19.0 us as they come, 14.3 with each key tile's lines asked for as those a tile group before them are
# used, 12.4 with lines in order of address; 10 where all lies in the caches.
AHEAD_BYTES = 4096
CACHE_F32, CACHE_F16, CACHE_Q8_0 = range(3)


class Attend:
    """The intrinsics for one target.

    Args:
        lanes: W.
        dot4: the target's intrinsic acc + dot4(weight bytes, activation bytes).
        bias: what stored key codes are offset by, as the target's dot4 wants them.
        has_half_and_fma: whether the CPU widens f16 and fuses a * b + c itself.
    """

    def __init__(self, lanes: int, dot4: Any, bias: int, *, has_half_and_fma: bool) -> None:
        self.lanes, self.bias, self.native = lanes, bias, has_half_and_fma
        self._dot4 = dot4._defn
        # sums at once for 1 .. MAX_ROWS rows: enough chains to hide an fma's latency, few enough for 16 registers (AVX2) or 32
        self._sums = (8, 4, 4, 2) if lanes == 8 else (8, 4, 4, 4)

        @intrinsic
        def score_rows(
            typing: Any, scores: Any, s_stride: Any, keys: Any, key_at: Any, tile: Any, tiles: Any, head_dim: Any,
            q: Any, qi: Any, qs: Any, qn: Any, row: Any, rows: Any, fmt: Any,
        ) -> Any:  # fmt: skip
            """scores[r * s_stride + p] = q[row + r] · k[p] for ``tiles`` tiles of keys, of ``tile`` bytes, from ``key_at`` on.

            Shapes: q f32 and qi i8 [rows of E padded to 32], qs f32 and qn i32 [rows of E / 32 rounded up]: the query as
            such, and as blocks of codes with scales and sums of codes for q8_0 keys.
            """
            n = types.intp
            signature = types.void(scores, n, keys, n, n, n, n, q, qi, qs, qn, n, n, n)
            return signature, self._emit_scores

        @intrinsic
        def mix_rows(
            typing: Any, out: Any, out_at: Any, out_stride: Any, values: Any, value_at: Any, tile: Any, first: Any, count: Any,
            columns: Any, weights: Any, w_at: Any, w_stride: Any, block_stride: Any, rows: Any, fmt: Any,
        ) -> Any:  # fmt: skip
            """out[out_at + r * out_stride + c] = sum over p < count of weights[r, p] * v[p, c] for ``columns`` vectors of c.

            Positions from ``first`` on are taken; unless that is 0, they are added to what ``out`` holds. ``value_at`` is the
            byte of position 0. weights f32 from ``w_at``: rows ``w_stride`` apart; for q8_0 one row per block of 32 columns,
            ``block_stride`` apart, the block's scales multiplied in.
            """
            n = types.intp
            signature = types.void(out, n, n, values, n, n, n, n, n, weights, n, n, n, n, n)
            return signature, self._emit_mix

        self.score_rows, self.mix_rows = score_rows, mix_rows

    def _emit_scores(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fmt = args[13]
        for rows in range(1, MAX_ROWS + 1):
            for kind in (CACHE_F32, CACHE_F16, CACHE_Q8_0):
                with builder.if_then(_both(builder, args[12], rows, fmt, kind)):
                    self._score_loop(context, builder, signature, args, rows, kind)
        return context.get_dummy_value()

    def _score_loop(self, context: Any, builder: Any, signature: Any, args: Any, rows: int, kind: int) -> None:
        scores, s_stride, _, key_at, tile, tiles = args[:6]
        row, n = args[11], args[12].type
        together = max(1, MAX_ROWS // rows) if kind == CACHE_Q8_0 else self._sums[rows - 1]  # codes take two sums a tile

        def several(first: Any, count: int) -> None:
            starts = [builder.add(key_at, builder.mul(builder.add(first, ir.Constant(n, j)), tile)) for j in range(count)]
            one = self._score_codes if kind == CACHE_Q8_0 else self._score_floats
            sums = one(context, builder, signature, args, row, starts, rows, kind)
            for r in range(rows):
                for j in range(count):
                    at = builder.mul(builder.add(first, ir.Constant(n, j)), ir.Constant(n, self.lanes))
                    at = builder.add(builder.mul(s_stride, ir.Constant(n, r)), at)
                    to = pointer(context, builder, signature.args[0], scores, at, vector(FLOAT, self.lanes))
                    builder.store(sums[r * count + j], to, align=4)

        _in_halves(builder, tiles, together, several)

    def _score_floats(
        self, context: Any, builder: Any, signature: Any, args: Any, row: Any, starts: list[Any], rows: int, kind: int
    ) -> list[Any]:
        """Sums [row][tile] over all components."""
        keys, head_dim, q = args[2], args[6], args[7]
        n, size = head_dim.type, 4 if kind == CACHE_F32 else 2
        stride = self._padded(builder, head_dim, 32)
        queries = [builder.mul(builder.add(row, ir.Constant(n, r)), stride) for r in range(rows)]
        zero = constant(FLOAT, self.lanes, 0.0)

        passed = len(starts) * size * self.lanes  # bytes of all tiles a component

        def step(e: Any, state: list[Any]) -> list[Any]:
            if kind == CACHE_F16:
                for ahead in range(0, passed, 64):
                    at = builder.add(builder.mul(e, ir.Constant(n, passed)), ir.Constant(n, ahead))
                    self._ask_ahead(context, builder, signature.args[2], keys, builder.add(starts[0], at))
            new = list(state)
            x = [self._broadcast(context, builder, signature.args[7], q, builder.add(query, e)) for query in queries]
            for j, start in enumerate(starts):
                at = builder.add(start, builder.mul(e, ir.Constant(n, size * self.lanes)))
                k = self._load(context, builder, signature.args[2], keys, at, kind)
                for r in range(rows):
                    slot = r * len(starts) + j
                    new[slot] = self._fma(builder, k, x[r], new[slot])
            return new

        return _loop(builder, head_dim, [zero] * (rows * len(starts)), step)

    def _score_codes(
        self, context: Any, builder: Any, signature: Any, args: Any, row: Any, starts: list[Any], rows: int, kind: int
    ) -> list[Any]:
        """Sums [row][tile] over blocks of d_k * d_q * (sum of codes), exact in i32 within a block."""
        keys, head_dim, qi, qs, qn = args[2], args[6], args[8], args[9], args[10]
        n, lanes = head_dim.type, self.lanes
        groups = builder.sdiv(self._padded(builder, head_dim, 4), ir.Constant(n, 4))
        blocks = builder.sdiv(self._padded(builder, head_dim, 32), ir.Constant(n, 32))
        num_columns = builder.mul(blocks, ir.Constant(n, 32))
        rows_at = [builder.add(row, ir.Constant(n, r)) for r in range(rows)]
        zero = constant(FLOAT, lanes, 0.0)

        def dots(g: Any, sums: list[Any]) -> list[Any]:
            """One group of four components of every row and tile."""
            at = [builder.add(start, builder.mul(g, ir.Constant(n, 4 * lanes))) for start in starts]
            for a in at:
                self._ask_ahead(context, builder, signature.args[2], keys, a)
            codes = [self._bytes(context, builder, signature.args[2], keys, a) for a in at]
            new = list(sums)
            for r in range(rows):
                from_ = builder.add(builder.mul(rows_at[r], num_columns), builder.mul(g, ir.Constant(n, 4)))
                word = builder.load(pointer(context, builder, signature.args[8], qi, from_, I32), align=1)
                x = builder.bitcast(splat(builder, word, lanes), vector(I8, 4 * lanes))
                for j, k in enumerate(codes):
                    slot = r * len(starts) + j
                    new[slot] = self._dot(context, builder, new[slot], k, x)
            return new

        def block(b: Any, state: list[Any]) -> list[Any]:
            at = [builder.add(builder.mul(rows_at[r], blocks), b) for r in range(rows)]
            start_sums = []
            for r in range(rows):
                total = builder.load(pointer(context, builder, signature.args[10], qn, at[r], I32), align=4)
                start_sums += [splat(builder, builder.mul(total, ir.Constant(I32, -self.bias)), lanes)] * len(starts)
            first = builder.mul(b, ir.Constant(n, 8))
            left = builder.sub(groups, first)
            count = builder.select(builder.icmp_signed("<", left, ir.Constant(n, 8)), left, ir.Constant(n, 8))
            pairs = builder.sdiv(count, ir.Constant(n, 2))

            def two(i: Any, sums: list[Any]) -> list[Any]:
                g = builder.add(first, builder.mul(i, ir.Constant(n, 2)))
                return dots(builder.add(g, ir.Constant(n, 1)), dots(g, sums))

            sums = _loop(builder, pairs, start_sums, two)
            done = builder.mul(pairs, ir.Constant(n, 2))
            rest = builder.sub(count, done)
            sums = _loop(builder, rest, sums, lambda i, s: dots(builder.add(first, builder.add(done, i)), s))
            scale_at = builder.mul(groups, ir.Constant(n, 4 * lanes))
            scale_at = builder.add(scale_at, builder.mul(b, ir.Constant(n, 2 * lanes)))
            scales = [
                self._load(context, builder, signature.args[2], keys, builder.add(start, scale_at), CACHE_F16)
                for start in starts
            ]
            new = []
            for r in range(rows):
                d = self._broadcast(context, builder, signature.args[9], qs, at[r])
                for j, scale in enumerate(scales):
                    slot = r * len(starts) + j
                    total = builder.sitofp(sums[slot], vector(FLOAT, lanes))
                    new.append(self._fma(builder, total, builder.fmul(scale, d), state[slot]))
            return new

        return _loop(builder, blocks, [zero] * (rows * len(starts)), block)

    def _emit_mix(self, context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for rows in range(1, MAX_ROWS + 1):
            for kind in (CACHE_F32, CACHE_F16, CACHE_Q8_0):
                with builder.if_then(_both(builder, args[13], rows, args[14], kind)):

                    def several(column: Any, count: int, rows: int = rows, kind: int = kind) -> None:
                        self._mix_loop(context, builder, signature, args, rows, column, count, kind)

                    _in_halves(builder, args[8], self._sums[rows - 1], several)
        return context.get_dummy_value()

    def _mix_loop(
        self, context: Any, builder: Any, signature: Any, args: Any, rows: int, column: Any, columns: int, kind: int
    ) -> None:
        """``columns`` vectors from vector number ``column`` on, a multiple of ``columns``."""
        out, out_at, out_stride, values, value_at, tile, first, count, all_columns, weights, w_at, w_stride, block_stride = (
            args[:13]
        )
        n, lanes = count.type, self.lanes
        size = {CACHE_F32: 4, CACHE_F16: 2, CACHE_Q8_0: 1}[kind]
        row_bytes = builder.mul(all_columns, ir.Constant(n, lanes * size))
        value_at = builder.add(value_at, builder.mul(column, ir.Constant(n, lanes * size)))
        scaled = 1
        if kind == CACHE_Q8_0:
            scaled = max(1, columns * lanes // 32)  # blocks the columns lie in
            block = builder.sdiv(builder.mul(column, ir.Constant(n, lanes)), ir.Constant(n, 32))
            w_at = builder.add(w_at, builder.mul(block, block_stride))
        row_starts = [builder.add(w_at, builder.mul(w_stride, ir.Constant(n, r))) for r in range(rows)]
        places = []
        for r in range(rows):
            for c in range(columns):
                at = builder.mul(builder.add(column, ir.Constant(n, c)), ir.Constant(n, lanes))
                at = builder.add(builder.add(out_at, at), builder.mul(out_stride, ir.Constant(n, r)))
                places.append(pointer(context, builder, signature.args[0], out, at, vector(FLOAT, lanes)))
        fresh = builder.icmp_signed("==", first, ir.Constant(n, 0))
        zero = constant(FLOAT, lanes, 0.0)
        start = [builder.select(fresh, zero, builder.load(place, align=4)) for place in places]

        def step(i: Any, state: list[Any]) -> list[Any]:
            p = builder.add(first, i)
            if kind == CACHE_Q8_0:
                at = builder.mul(builder.sdiv(p, ir.Constant(n, lanes)), tile)
                at = builder.add(at, builder.mul(builder.and_(p, ir.Constant(n, lanes - 1)), row_bytes))
            else:  # nothing lies between one tile and the next
                at = builder.mul(p, row_bytes)
            at = builder.add(value_at, at)
            if kind != CACHE_F32:
                for line in range(0, columns * lanes * size, 64):
                    self._ask_ahead(context, builder, signature.args[3], values, builder.add(at, ir.Constant(n, line)))
            found = []
            for r in range(rows):
                for b in range(scaled):
                    from_ = builder.add(builder.add(row_starts[r], p), builder.mul(block_stride, ir.Constant(n, b)))
                    found.append(self._broadcast(context, builder, signature.args[9], weights, from_))
            new = list(state)
            for c in range(columns):
                from_ = builder.add(at, ir.Constant(n, c * lanes * size))
                v = self._load(context, builder, signature.args[3], values, from_, kind)
                for r in range(rows):
                    slot = r * columns + c
                    weight = found[r * scaled + (c * lanes // 32 if scaled > 1 else 0)]
                    new[slot] = self._fma(builder, v, weight, new[slot])
            return new

        sums = _loop(builder, builder.sub(count, first), start, step)
        for place, value in zip(places, sums, strict=True):
            builder.store(value, place, align=4)

    def _load(self, context: Any, builder: Any, array_type: Any, array: Any, at: Any, kind: int) -> Any:
        """W cached values from byte ``at``, as f32."""
        lanes, v_f32 = self.lanes, vector(FLOAT, self.lanes)
        stored = {CACHE_F32: v_f32, CACHE_F16: vector(HALF if self.native else I16, lanes), CACHE_Q8_0: vector(I8, lanes)}[kind]
        value = builder.load(pointer(context, builder, array_type, array, at, stored), align=1)
        if kind == CACHE_F32:
            return value
        if kind == CACHE_Q8_0:
            return builder.sitofp(builder.sext(value, vector(I32, lanes)), v_f32)
        return builder.fpext(value, v_f32) if self.native else f16_to_f32(builder, value, lanes)

    def _ask_ahead(self, context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> None:
        """Prefetch what follows ``at`` at a distance: perhaps the next chunk's, perhaps nothing of use; never faults."""
        line = pointer(context, builder, array_type, array, builder.add(at, ir.Constant(at.type, AHEAD_BYTES)), I8)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [line, *(ir.Constant(I32, k) for k in (0, 3, 1))])

    def _bytes(self, context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
        return builder.load(pointer(context, builder, array_type, array, at, vector(I8, 4 * self.lanes)), align=1)

    def _broadcast(self, context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
        return splat(builder, builder.load(pointer(context, builder, array_type, array, at, FLOAT), align=4), self.lanes)

    def _fma(self, builder: Any, a: Any, b: Any, c: Any) -> Any:
        if self.native:
            return call(builder, f"llvm.fma.v{self.lanes}f32", vector(FLOAT, self.lanes), [a, b, c])
        return builder.fadd(builder.fmul(a, b), c)

    def _dot(self, context: Any, builder: Any, acc: Any, weights: Any, activations: Any) -> Any:
        i32, byte = Vec("i32", self.lanes), Vec("i8", 4 * self.lanes)
        signature, emit = self._dot4(None, i32, byte, byte)
        return emit(context, builder, signature, [acc, weights, activations])

    @staticmethod
    def _padded(builder: Any, count: Any, unit: int) -> Any:
        """``count`` rounded up to a multiple of ``unit``, a power of two."""
        return builder.and_(builder.add(count, ir.Constant(count.type, unit - 1)), ir.Constant(count.type, -unit))


def _both(builder: Any, rows: Any, wanted_rows: int, fmt: Any, wanted_fmt: int) -> Any:
    is_rows = builder.icmp_signed("==", rows, ir.Constant(rows.type, wanted_rows))
    return builder.and_(is_rows, builder.icmp_signed("==", fmt, ir.Constant(fmt.type, wanted_fmt)))


def _in_halves(builder: Any, count: Any, most: int, several: Callable[[Any, int], None]) -> None:
    """Call ``several(first, size)`` for 0..count-1 in parts of ``most``, then half as many, down to one."""
    n = count.type
    done = ir.Constant(n, 0)
    size = most
    while size:
        parts = builder.sdiv(builder.sub(count, done), ir.Constant(n, size))

        def one(i: Any, _: list[Any], done: Any = done, size: int = size) -> list[Any]:
            several(builder.add(done, builder.mul(i, ir.Constant(n, size))), size)
            return []

        _loop(builder, parts, [], one)
        done = builder.add(done, builder.mul(parts, ir.Constant(n, size)))
        size //= 2


def _loop(builder: Any, count: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """For i in 0..count-1: state = body(i, state). Returns the last state; the values stay in registers."""
    before = builder.block
    inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(count.type, 0)), inside, after)
    builder.position_at_end(inside)
    i = builder.phi(I64)
    carried = [builder.phi(value.type) for value in state]
    new = body(i, carried)
    following, last = builder.add(i, ir.Constant(I64, 1)), builder.block
    for phi, start, end in zip([i, *carried], [ir.Constant(I64, 0), *state], [following, *new], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(end, last)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    results = []
    for start, end in zip(state, new, strict=True):
        phi = builder.phi(start.type)
        phi.add_incoming(start, before)
        phi.add_incoming(end, last)
        results.append(phi)
    return results
