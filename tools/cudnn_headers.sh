#!/usr/bin/env bash
# Fetches the headers that attention by cuDNN is built with, cudnn-frontend's and cuDNN's own, where this machine has none:
# from NVIDIA's packages on PyPI, at the versions and checksums below, into BUILD_DIR/cudnn/include, where CMake looks.
#
#   tools/cudnn_headers.sh [BUILD_DIR]       # default: build
#
# No library is fetched: a run loads cuDNN where that is installed. Without a network the build goes on without cuDNN, and
# this script says so. Its exit code is 0 either way.
set -euo pipefail
. "$(dirname "$0")/common.sh"

case "${1:-}" in -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
into=${1:-$top/build}/cudnn

# Whether the compiler finds the header, or the CUDA toolkit has it.
installed() {
  local nvcc
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" |
    "${CXX:-c++}" -E -x c++ -I"$(dirname "$(readlink -f "$nvcc")")/../include" - >/dev/null 2>&1
}

# fetch HEADER PACKAGE==VERSION SHA256: of the wheel for x86-64. The headers are the same for all processors.
fetch() {
  local folder
  if installed "$1" || [ -e "$into/$2" ]; then return 0; fi
  python3 -m pip --version >/dev/null 2>&1 || (need python3-pip) || true
  folder=$(mktemp -d)
  echo "$2 --hash=sha256:$3" >"$folder/wheel.txt"
  if ! python3 -m pip download --quiet --disable-pip-version-check --retries 1 --no-deps --require-hashes --only-binary=:all: \
    --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --dest "$folder" --requirement "$folder/wheel.txt" >"$folder/log" 2>&1; then
    say "attention by cuDNN is not built: $1 is not installed, and $2 could not be had from PyPI ($(grep -m1 '^ERROR' "$folder/log" || echo 'python3 has no pip'))"
    rm -rf "$folder"
    return 1
  fi
  mkdir -p "$into/include"
  python3 - "$folder"/*.whl "$into" <<'P'
import pathlib, re, sys, zipfile
wheel, into = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if inside := re.fullmatch(r"(?:nvidia/cudnn/)?include/(.+\.h)", name):
            file = pathlib.Path(into, "include", inside[1])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.read(name))
P
  rm -rf "$folder"
  touch "$into/$2"
  say "headers of $2: $into/include"
}

fetch cudnn_frontend.h nvidia-cudnn-frontend==1.32.0 8b354a8e550c083eb247f1eb39a7d69a4a269075f5a01e4fcbd2531680b17239 || exit 0
fetch cudnn.h nvidia-cudnn-cu13==9.19.0.56 d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf || exit 0
