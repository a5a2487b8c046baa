"""Stored blocks moved to the places where the products read them; the layouts are drawn in the ``matvec`` modules.

    lanes = rows of a tile    t tile index    r row within its tile    u super-block of a row    k block of 32 in it

Every function packs one tile. Row r of it begins at byte ``starts[first + r]`` of ``stored``. The order is that of the packed
bytes, so that each of their cache lines is written whole, and the rows are read side by side.
"""

from __future__ import annotations

from deepthin.engine.jit import kernel
from deepthin.engine.kernels.matvec import F32, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from deepthin.engine.simd import load_half, load_word, never_inline, store_half, store_word

_LINE = (
    64  # bytes of a row taken at a time, so that rows a multiple of 4096 bytes apart do not push each other out of the cache
)
_LOW, _BITS, _PAIRS = 0x0F0F0F0F, 0x01010101, 0x03030303  # of each byte: low nibble, last bit, last two bits


@kernel
def pack_tiles(arena, data_at, scale_at, data_step, scale_step, stored, starts, cols, fmt, lanes, flip, t0, t1):
    """Pack tiles t0..t1-1, whose rows ``starts`` i64 [(t1 - t0) * lanes] lists in order.

    A tile takes ``data_step`` bytes from ``data_at`` on and ``scale_step`` bytes from ``scale_at`` on. ``flip`` is laid over
    each word of codes by exclusive or: 0x80808080 stores 8-bit codes as code + 128.
    """
    for t in range(t0, t1):
        first, data, scales = (t - t0) * lanes, data_at + t * data_step, scale_at + t * scale_step
        if fmt == F32:
            _words(arena, data, stored, starts, first, cols, lanes)
        elif fmt < Q8_0:
            _halves(arena, data, stored, starts, first, cols, lanes)
        elif fmt < Q4_K:
            _blocks(arena, data, scales, stored, starts, first, cols // 32, fmt, lanes, flip)
        elif fmt == Q6_K:
            _blocks_q6_k(arena, data, scales, stored, starts, first, cols // 256, lanes)
        else:
            _blocks_q45_k(arena, data, scales, stored, starts, first, cols // 256, fmt, lanes)


@kernel
def _words(arena, at, stored, starts, first, cols, lanes):
    """Values of 4 bytes."""
    never_inline()
    step = _LINE // 4
    for c0 in range(0, cols, step):
        for r in range(lanes):
            p = starts[first + r]
            for c in range(c0, min(c0 + step, cols)):
                store_word(arena, at + (c * lanes + r) * 4, load_word(stored, p + c * 4))


@kernel
def _halves(arena, at, stored, starts, first, cols, lanes):
    """Values of 2 bytes: two columns of two rows at a time, and a last odd column alone."""
    never_inline()
    step = _LINE // 2
    for c0 in range(0, cols - 1, step):
        for r in range(0, lanes, 2):
            p0, p1 = starts[first + r], starts[first + r + 1]
            for c in range(c0, min(c0 + step, cols - 1), 2):
                upper, lower = load_word(stored, p0 + c * 2), load_word(stored, p1 + c * 2)
                store_word(arena, at + (c * lanes + r) * 2, upper & 0xFFFF | lower << 16)
                store_word(arena, at + ((c + 1) * lanes + r) * 2, upper >> 16 | lower & 0xFFFF0000)
    if cols % 2:
        c = cols - 1
        for r in range(lanes):
            store_half(arena, at + (c * lanes + r) * 2, load_half(stored, starts[first + r] + c * 2))


@kernel
def _blocks(arena, data_at, scale_at, stored, starts, first, blocks, fmt, lanes, flip):
    """Blocks of 32, from q8_0 to q5_1: one or two scales, the fifth bits, then words of codes that stay as they are."""
    never_inline()
    scales = 2 if fmt in (Q4_1, Q5_1) else 1
    planes = 1 if fmt in (Q5_0, Q5_1) else 0
    words = 8 if fmt == Q8_0 else 4
    size = 2 * scales + 4 * (planes + words)
    group = 4 * lanes  # bytes between the same row's words of two groups
    for b in range(blocks):
        for r in range(lanes):
            p = starts[first + r] + b * size
            scale = scale_at + (b * scales * lanes + r) * 2
            store_half(arena, scale, load_half(stored, p))
            if scales == 2:
                store_half(arena, scale + 2 * lanes, load_half(stored, p + 2))
            p += 2 * scales
            at = data_at + (b * (words + planes) * lanes + r) * 4
            if planes:
                store_word(arena, at + 4 * group, _fifth_bits(load_word(stored, p)))
                p += 4
            for g in range(0, words, 4):
                store_word(arena, at + g * group, load_word(stored, p + 4 * g) ^ flip)
                store_word(arena, at + (g + 1) * group, load_word(stored, p + 4 * g + 4) ^ flip)
                store_word(arena, at + (g + 2) * group, load_word(stored, p + 4 * g + 8) ^ flip)
                store_word(arena, at + (g + 3) * group, load_word(stored, p + 4 * g + 12) ^ flip)


@kernel
def _fifth_bits(bits):
    """Fifth bits of columns 0..31 as a plane of ``matvec_5bit.py``: bits 0..3 of byte j are columns 16 + 4g + j."""
    turned = bits >> 16 | (bits & 0xFFFF) << 16
    plane = 0
    for j in range(0, 4, 2):
        # one bit of each nibble for byte j and, 32 bits above, for byte j + 1; then drawn together
        every = turned >> j & 0x11111111 | (turned >> j + 1 & 0x11111111) << 32
        every = (every | every >> 3) & 0x0303030303030303
        every = (every | every >> 6) & 0x000F000F000F000F
        every = every | every >> 12
        plane |= (every & 0xFF | (every >> 32 & 0xFF) << 8) << 8 * j
    return plane


@kernel
def _blocks_q45_k(arena, data_at, scale_at, stored, starts, first, supers, fmt, lanes):
    """Super-blocks of q4_k and q5_k; ``quants_k.py`` says how the file packs their scales."""
    never_inline()
    groups = 5 if fmt == Q5_K else 4
    size = 176 if fmt == Q5_K else 144
    for u in range(supers):
        for r in range(lanes):
            p = starts[first + r] + u * size
            at = scale_at + u * 20 * lanes + 2 * r
            store_half(arena, at, load_half(stored, p))
            store_half(arena, at + 2 * lanes, load_half(stored, p + 2))
            p += 4
            at = scale_at + (u * 20 + 4) * lanes + r
            for k in range(4):
                low, high, both = stored[p + k], stored[p + 4 + k], stored[p + 8 + k]
                arena[at + 2 * k * lanes] = low & 63
                arena[at + (2 * k + 1) * lanes] = high & 63
                arena[at + (2 * k + 8) * lanes] = both & 15 | low >> 2 & 48
                arena[at + (2 * k + 9) * lanes] = both >> 4 | high >> 2 & 48
            fifth = p + 12
            p = fifth + (32 if fmt == Q5_K else 0)
            for pair in range(4):
                even = data_at + ((u * 8 + 2 * pair) * groups * lanes + r) * 4
                odd = even + groups * lanes * 4
                for g in range(4):
                    left, right = load_word(stored, p + 32 * pair + 4 * g), load_word(stored, p + 32 * pair + 16 + 4 * g)
                    store_word(arena, even + g * lanes * 4, left & _LOW | (right & _LOW) << 4)
                    store_word(arena, odd + g * lanes * 4, left >> 4 & _LOW | right & _LOW << 4)
                if fmt == Q5_K:
                    store_word(arena, even + 4 * lanes * 4, _fifth_of_block(stored, fifth, 2 * pair))
                    store_word(arena, odd + 4 * lanes * 4, _fifth_of_block(stored, fifth, 2 * pair + 1))


@kernel
def _fifth_of_block(stored, p, k):
    """The plane of block k, whose fifth bits are bit k of the 32 bytes at ``p``."""
    plane = 0
    for g in range(4):
        plane |= (load_word(stored, p + 16 + 4 * g) >> k & _BITS) << g
        plane |= (load_word(stored, p + 4 * g) >> k & _BITS) << 4 + g
    return plane


@kernel
def _blocks_q6_k(arena, data_at, scale_at, stored, starts, first, supers, lanes):
    """Super-blocks of q6_k: two halves of four blocks, which share 64 bytes of nibbles and 32 bytes of upper bit pairs."""
    never_inline()
    for u in range(supers):
        for r in range(lanes):
            p = starts[first + r] + u * 210
            at = scale_at + u * 18 * lanes
            store_half(arena, at + 2 * r, load_half(stored, p + 208))
            for i in range(16):
                arena[at + (2 + i) * lanes + r] = stored[p + 192 + i]
            for k in range(8):
                low, high = p + k // 4 * 64 + k % 2 * 32, p + 128 + k // 4 * 32
                down, shift = k // 2 % 2 * 4, k % 4 * 2
                at = data_at + ((u * 8 + k) * 6 * lanes + r) * 4
                for g in range(4):
                    left, right = load_word(stored, low + 4 * g) >> down, load_word(stored, low + 16 + 4 * g) >> down
                    store_word(arena, at + g * lanes * 4, left & _LOW | (right & _LOW) << 4)
                for i in range(2):
                    half = high + 16 * i
                    plane = load_word(stored, half + 8) >> shift & _PAIRS
                    plane |= (load_word(stored, half + 12) >> shift & _PAIRS) << 2
                    plane |= (load_word(stored, half) >> shift & _PAIRS) << 4
                    plane |= (load_word(stored, half + 4) >> shift & _PAIRS) << 6
                    store_word(arena, at + (4 + i) * lanes * 4, plane)
