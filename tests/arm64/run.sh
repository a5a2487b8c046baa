#!/usr/bin/env bash
# tests/arm64/run.sh DIR [NAME...]
#
# The kernels' tests and the whole decoder's on arm64 CPUs that qemu emulates, some minutes each; README.md beside this file
# says what DIR holds and how to fill it. NAMEs are those of the table below, all when none is given. PARTS is "kernels",
# "decoder" or, when it is not set, both.
set -euo pipefail

# name    | qemu -cpu    | part  | target       | DEEPTHIN_SIMD | features as /proc/cpuinfo lists them
dots="fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
matrices="$dots sha3 sm3 sm4 sha512 asimdfhm dit uscat ilrcpc flagm paca pacg dcpodp i8mm bf16"
table="
a72       | cortex-a72   | 0xd08 | neon         |          | fp asimd evtstrm crc32 cpuid
a76       | cortex-a76   | 0xd0b | neon_dotprod |          | $dots
n1        | neoverse-n1  | 0xd0c | neon_dotprod |          | $dots
v1        | max,sve=off  | 0xd40 | neon_i8mm    |          | $matrices
unnamed   | max,sve=off  | 0xfff | neon_i8mm    |          | $matrices
portable  | cortex-a72   | 0xd08 | portable     | portable | fp asimd evtstrm crc32 cpuid
"
# Raspberry Pi 4; Raspberry Pi 5; Graviton2; Graviton3 without SVE; a CPU that LLVM calls generic; no NEON intrinsics at all

[ $# -ge 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$(realpath "$1"); shift
repo=$(realpath "$(dirname "$0")/../..")
parts=" ${PARTS:-kernels decoder} "

qemu=$(ls "$dir"/qemu/usr/bin/qemu-aarch64-static 2>/dev/null || command -v qemu-aarch64-static || command -v qemu-aarch64)
python=$(ls "$dir"/root/usr/bin/python3.[0-9]* | head -1)
work=$(mktemp -d "$dir/run-XXXXXX") # below DIR, where hard links to its files are possible
trap 'rm -rf "$work"' EXIT

# The kernel cannot start an arm64 program by itself, so child processes of the tests go through this wrapper as well.
mkdir "$work/site"
cat > "$work/site/sitecustomize.py" <<'PYTHON'
import os, sys
sys.executable = sys._base_executable = os.environ["ARM64_PYTHON"]
PYTHON
cat > "$work/python" <<SHELL
#!/bin/sh
ulimit -c 0
exec "$qemu" -cpu "\$ARM64_CPU" -L "\$ARM64_ROOT" "$python" "\$@"
SHELL
chmod +x "$work/python"
export ARM64_PYTHON="$work/python" PYTHONPATH="$work/site:$dir/site:$repo/src" PYTHONPYCACHEPREFIX="$work/pyc"
unset NUMBA_CPU_NAME NUMBA_CPU_FEATURES DEEPTHIN_SIMD
cd "$repo"

check='
import sys
from deepthin.engine.cpu import codegen_cpu, simd_target
print(f"LLVM calls it {codegen_cpu().name}; target {simd_target()}, expected {sys.argv[1]}")
sys.exit(simd_target() != sys.argv[1])'
failed=""
while IFS='|' read -r name cpu part target simd features; do
  read -r name cpu part target simd <<< "$name $cpu $part $target $simd"
  [ -n "$name" ] || continue
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  printf '\n== %s: %s\n' "$name" "$cpu"
  cp -al "$dir/root" "$work/$name" # qemu -L takes absolute paths from here, so this CPU has a /proc/cpuinfo of its own
  mkdir -p "$work/$name/proc"
  rm -f "$work/$name/proc/cpuinfo"
  printf 'processor\t: %d\nFeatures\t:%s\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: %s\nCPU revision\t: 1\n\n' \
    0 "$features" "$part" 1 "$features" "$part" > "$work/$name/proc/cpuinfo"
  export ARM64_CPU=$cpu ARM64_ROOT="$work/$name" DEEPTHIN_CACHE_DIR="$work/cache-$name" DEEPTHIN_SIMD=$simd
  tests=""
  if [[ $parts == *" kernels "* ]]; then
    tests+=" tests/engine/test_kernels.py tests/engine/test_cpu.py"
    tests+=" tests/engine/test_jit.py::test_a_waiter_parks_instead_of_burning_a_core"
    for test in attention_equals_softmax_in_float64 nan_and_infinity_reach_the_result f16_is_stored_rounded_to_nearest_even; do
      tests+=" tests/engine/test_attention.py::test_$test"
    done
  fi
  [[ $parts != *" decoder "* ]] || tests+=" tests/arm64/test_whole_decoder.py"
  "$work/python" -c "$check" "$target" < /dev/null && "$work/python" -m pytest -q -p no:cacheprovider $tests < /dev/null \
    || failed+=" $name"
done <<< "$table"

[ -z "$failed" ] || { printf '\nfailed on:%s\n' "$failed"; exit 1; }
printf '\nall passed\n'
