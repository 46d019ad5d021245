#!/usr/bin/env bash
# From a fresh clone to a trained model, through all three tiers: installs what is needed (Debian 12 or
# Ubuntu 24.04), builds, fetches a text, trains configs/quickstart.json on it and prints a sample.
#
# With a GPU and the CUDA toolkit it builds the CUDA code too, and trains there.
#
#   tools/quickstart.sh [TEXT_FILE] [-- MORE FLAGS OF ziggurat train]
#
# Without TEXT_FILE the text is the King James Bible, from the distribution's package bible-kjv.
set -euo pipefail
. "$(dirname "$0")/common.sh"

text=
case "${1:-}" in
  -h|--help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --|'') ;;
  *) text=$(realpath -- "$1") || exit 2; shift ;;
esac
if [ "${1:-}" = -- ]; then shift; fi
[ -z "$text" ] || [ -r "$text" ] || die "$text cannot be read" "give a text file, or nothing for the Bible"

say "1/3 packages"
# shellcheck disable=SC2086
need $build_packages
[ -n "$text" ] || need bible-kjv

say "2/3 build"
cuda=(-DZG_CUDA=OFF)
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  PATH=$PATH:/usr/local/cuda/bin
  if command -v nvcc >/dev/null; then
    cuda=(-DZG_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native)
    say "   with CUDA: trains on $(nvidia-smi -L | head -1)"
    "$top/tools/cudnn_headers.sh"
  else
    say "   there is a GPU but no CUDA toolkit (nvcc): trains on the processor. Install CUDA 13 to use the GPU."
  fi
fi
configure release -DZG_TESTS=OFF -DZG_BENCH=OFF "${cuda[@]}"
cd "$top"
ninja -C build ziggurat

say "3/3 train"
mkdir -p build/quickstart
if [ -z "$text" ]; then
  text=build/quickstart/bible.txt
  if [ ! -s "$text" ]; then
    PATH=$PATH:/usr/games bible -f gen1:1-rev22:21 >"$text.part"
    mv "$text.part" "$text"
  fi
fi
exec build/ziggurat train configs/quickstart.json --set "data.train=$text" "$@"
