#!/usr/bin/env bash
# Registers, spills and shared memory of every CUDA kernel, as nvcc's assembler reports them, in tables.
#
#   tools/ptxas.sh [ARCHITECTURE...]     default: 80 90 100; writes bench/results/ptxas_smARCHITECTURE.md
#   tools/ptxas.sh --out DIR [ARCHITECTURE...]
set -euo pipefail
. "$(dirname "$0")/common.sh"

out=$top/bench/results
case "${1:-}" in
  -h|--help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --out) out=$2; shift 2 ;;
esac
[ $# -gt 0 ] || set -- 80 90 100
command -v nvcc >/dev/null || die "nvcc is not here" "install the CUDA toolkit, or add its bin to PATH"
cd "$top"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for architecture in "$@"; do
  for source in kernels/cuda/*.cu; do
    name=$(basename "$source" .cu)
    flags=()
    # As CMakeLists.txt compiles it.
    case "$name" in update|quantize) flags+=(-fmad=false) ;; esac
    nvcc -arch="sm_$architecture" -std=c++20 -O3 --expt-relaxed-constexpr "${flags[@]}" -I. -Iinclude -Xptxas -v -c "$source" \
      -o "$work/object" 2>"$work/$name.txt" || { cat "$work/$name.txt" >&2; die "$source does not compile for sm_$architecture"; }
  done
  python3 tools/ptxas_table.py "$architecture" "$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')" \
    "$(git describe --always --dirty)" "$work"/*.txt \
    >"$work/table.md"
  mv "$work/table.md" "$out/ptxas_sm$architecture.md"
  say "$out/ptxas_sm$architecture.md: $(sed -n '3p' "$out/ptxas_sm$architecture.md")"
done
