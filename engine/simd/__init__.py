"""A small vocabulary of vector operations for kernels: Numba types and intrinsics, one file per target.

``W`` lanes of f32 or i32 make a vector; a byte vector has 4·W lanes. Everything a kernel needs is imported from here; which
file provides the target-dependent part is fixed by :func:`deepthin.engine.cpu.simd_target` at import.
"""

from __future__ import annotations

from deepthin.engine.cpu import has_half_and_fma, simd_target

if simd_target() == "avx512_vnni":
    from deepthin.engine.simd.avx512_vnni import Q8_BIAS, W, dot4_nibbles, dot4_q8
elif simd_target() == "avx_vnni":
    from deepthin.engine.simd.avx_vnni import Q8_BIAS, W, dot4_nibbles, dot4_q8
elif simd_target() == "avx2":
    from deepthin.engine.simd.avx2 import Q8_BIAS, W, dot4_nibbles, dot4_q8
elif simd_target() in ("neon_i8mm", "neon_dotprod"):
    from deepthin.engine.simd.neon_dotprod import Q8_BIAS, W, dot4_nibbles, dot4_q8
elif simd_target() == "neon":
    from deepthin.engine.simd.neon import Q8_BIAS, W, dot4_nibbles, dot4_q8
else:
    from deepthin.engine.simd.portable import Q8_BIAS, W, dot4_nibbles, dot4_q8

if simd_target() == "avx2":
    from deepthin.engine.simd.avx2 import Q6_BIAS, dot_narrow, dot_narrow_6bit, end_narrow, start_narrow, together
elif simd_target() == "neon":
    from deepthin.engine.simd.neon import Q6_BIAS, dot_narrow, dot_narrow_6bit, end_narrow, start_narrow
    from deepthin.engine.simd.wide import together
else:
    from deepthin.engine.simd.wide import Q6_BIAS, together, wide_sums

    start_narrow, end_narrow = wide_sums(W)
    dot_narrow = dot_narrow_6bit = dot4_nibbles

from deepthin.engine.simd.attend import CACHE_F16, CACHE_F32, CACHE_Q8_0, MAX_ROWS, Attend
from deepthin.engine.simd.inline import allow_dots, always_inline
from deepthin.engine.simd.sync import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    futex_wait,
    futex_wake,
    never_inline,
    read_cycles,
    spin_pause,
)
from deepthin.engine.simd.vectors import (
    Vectors,
    load_scalar_bf16,
    load_scalar_f16,
    load_scalar_f32,
    store_scalar_f32,
)

_v = Vectors(W, has_half_and_fma=has_half_and_fma())
add = _v.add
add_i32 = _v.add_i32
as_f32 = _v.as_f32
broadcast4 = _v.broadcast4
broadcast_f32 = _v.broadcast_f32
broadcast_i32 = _v.broadcast_i32
div = _v.div
exp = _v.exp
fma = _v.fma
high_nibbles = _v.high_nibbles
load_bf16 = _v.load_bf16
load_bytes = _v.load_bytes
load_f16 = _v.load_f16
load_f32 = _v.load_f32
load_s8 = _v.load_s8
load_u8 = _v.load_u8
low_nibbles = _v.low_nibbles
maximum = _v.maximum
absolute = _v.absolute
mul = _v.mul
mul_i32 = _v.mul_i32
raised = _v.raised
reduce_add = _v.reduce_add
reduce_add_i32 = _v.reduce_add_i32
reduce_max = _v.reduce_max
round_i32 = _v.round_i32
splat = _v.splat
splat_byte = _v.splat_byte
splat_i32 = _v.splat_i32
store_f16 = _v.store_f16
store_f32 = _v.store_f32
store_i8 = _v.store_i8
store_scalar_f16 = _v.store_scalar_f16
sub = _v.sub
sub_i32 = _v.sub_i32
_attend = Attend(W, dot4_q8, Q8_BIAS, has_half_and_fma=has_half_and_fma())
mix_one = _attend.mix_one
mix_wide = _attend.mix_wide
MIX_WIDE = _attend.wide
score_rows = _attend.score_rows
with_high_bits = _v.with_high_bits

__all__ = [
    "CACHE_F16",
    "CACHE_F32",
    "CACHE_Q8_0",
    "MAX_ROWS",
    "MIX_WIDE",
    "Q6_BIAS",
    "Q8_BIAS",
    "W",
    "absolute",
    "add",
    "add_i32",
    "allow_dots",
    "always_inline",
    "as_f32",
    "atomic_add",
    "atomic_exchange",
    "atomic_load",
    "broadcast4",
    "broadcast_f32",
    "broadcast_i32",
    "div",
    "dot4_nibbles",
    "dot4_q8",
    "dot_narrow",
    "dot_narrow_6bit",
    "end_narrow",
    "exp",
    "fma",
    "futex_wait",
    "futex_wake",
    "high_nibbles",
    "load_bf16",
    "load_bytes",
    "load_f16",
    "load_f32",
    "load_s8",
    "load_scalar_bf16",
    "load_scalar_f16",
    "load_scalar_f32",
    "load_u8",
    "low_nibbles",
    "maximum",
    "mix_one",
    "mix_wide",
    "mul",
    "mul_i32",
    "never_inline",
    "raised",
    "read_cycles",
    "reduce_add",
    "reduce_add_i32",
    "reduce_max",
    "round_i32",
    "score_rows",
    "spin_pause",
    "splat",
    "splat_byte",
    "splat_i32",
    "start_narrow",
    "store_f16",
    "store_f32",
    "store_i8",
    "store_scalar_f16",
    "store_scalar_f32",
    "sub",
    "sub_i32",
    "together",
    "with_high_bits",
]
