#!/usr/bin/env bash
# Installs what the tests need (Debian 12 or Ubuntu 24.04), builds everything and runs all tests.
#
#   tools/test.sh [PRESET] [CTEST FLAGS...]      PRESET: release (default), dev, asan, tsan, cuda
#
# Tests run side by side, three for each two processors, since some wait for the drive; --parallel 1 among the flags has
# them run one by one.
# ZG_TORCH=1 fetches torch and what the Python package is tested with beside it (tools/python_packages.sh --torch);
# where they are there already they are used.
# ZG_REQUIRE_GPU=1 turns the GPU suites, which are skipped where there is no GPU, into failures there.
# The last line is "N passed, N failed, N skipped"; the exit code is 0 only if none failed.
set -euo pipefail
. "$(dirname "$0")/common.sh"

preset=release
case "${1:-}" in
  -h|--help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
  release|dev|asan|tsan|cuda) preset=$1; shift ;;
esac

# shellcheck disable=SC2086
need $build_packages $test_packages python3 python3-dev python3-pip e2fsprogs mount
cd "$top"
options=(-DZG_TESTS=ON -DZG_BENCH=ON)
# The CUDA code is compiled wherever there is a compiler for it, for one architecture: its logic is tested on the host
# in any case (kernels/cuda/emulation), and on a GPU where there is one.
if [ "$preset" = release ] && command -v nvcc >/dev/null; then
  options+=(-DZG_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=${ZG_CUDA_ARCHITECTURES:-90}")
fi
folder=build
[ "$preset" = release ] || folder=build/$preset
case "$preset ${options[*]}" in cuda\ *|*ZG_CUDA=ON*) tools/cudnn_headers.sh "$folder" ;; esac
# The Python package, where nanobind can be had.
if [ "$preset" = release ]; then
  options+=(-DZG_CHECKED=ON)  # what reads files that nobody trusts, under sanitizers: tests/checked.cmake
  packages=$(tools/python_packages.sh "$top/$folder")
  if [ -n "$packages" ]; then
    options+=(-DZG_PYTHON=ON "-Dnanobind_DIR=$packages/nanobind/cmake" "-DPython_EXECUTABLE=$(python3 -c 'import sys; print(sys.executable)')")
    with_torch=
    if [ "${ZG_TORCH:-}" = 1 ] || compgen -G "${XDG_CACHE_HOME:-$HOME/.cache}/ziggurat/*/complete" >/dev/null; then
      with_torch=$(tools/python_packages.sh --torch)
    fi
    options+=("-DZG_TORCH_PYTHON=$with_torch")
  else
    options+=(-DZG_PYTHON=OFF)
  fi
fi
configure "$preset" "${options[@]}"
ninja -C "$folder"

# What the sanitizers cannot know: libraries that are not built with them.
export TSAN_OPTIONS="suppressions=$top/tests/tsan.supp history_size=4 ${TSAN_OPTIONS:-}"
export ASAN_OPTIONS="detect_leaks=1 ${ASAN_OPTIONS:-}"
export LSAN_OPTIONS="suppressions=$top/tests/lsan.supp ${LSAN_OPTIONS:-}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
(cd "$folder" && ctest --output-on-failure --parallel "$(( ($(nproc) * 3 + 1) / 2 ))" "$@") | tee "$log" || status=$?
count() { grep -cE "$1" "$log" || true; }
passed=$(count '^ *[0-9]+/[0-9]+ Test .* Passed ')
skipped=$(count '^ *[0-9]+/[0-9]+ Test .*\*\*\*Skipped ')
total=$(count '^ *[0-9]+/[0-9]+ Test ')
failed=$((total - passed - skipped))
if [ "$total" = 0 ]; then say "no test ran"; exit 1; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ] && [ "$status" = 0 ]
