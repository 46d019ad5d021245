#!/usr/bin/env bash
# Fetches what the Python package is built and tested with, nanobind and NumPy, and what tools/prepare.py needs, tokenizers
# and Jinja2, from PyPI at the versions and checksums below, into BUILD_DIR/python-packages: nothing is installed into
# the system's Python.
#
#   tools/python_packages.sh [BUILD_DIR]       # default: build
#   tools/python_packages.sh --torch           # torch, transformers, peft, accelerate, lightning, tensorboard, ...
#
# With --torch they come into an environment of their own, outside of the tree: in $XDG_CACHE_HOME/ziggurat
# (~/.cache/ziggurat), some 6 GB with the CUDA libraries that PyPI's torch brings.
#
# Where PyPI cannot be reached this script says so in a line and ends with 0: the package is then not built, and its
# tests are skipped. The last line on stdout is the folder, or with --torch the environment's Python, if it is there.
set -euo pipefail
. "$(dirname "$0")/common.sh"

case "${1:-}" in -h|--help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
if [ "${1:-}" = --torch ]; then
  version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  into=${XDG_CACHE_HOME:-$HOME/.cache}/ziggurat/python$version-torch2.15.0
  if [ ! -e "$into/complete" ]; then
    mkdir -p "$(dirname "$into")"
    if [ "$(df --output=avail -B1M "$(dirname "$into")" | tail -n1)" -lt 12000 ]; then
      say "the tests that need torch are skipped: it takes 12 GB of room on the way, which $(dirname "$into") has not"
      exit 0
    fi
    rm -rf "$into"
    python3 -m venv "$into"
    if ! "$into/bin/pip" install --quiet --disable-pip-version-check --retries 1 --only-binary=:all: --no-cache-dir \
      torch==2.15.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 lightning==2.6.6 tensorboard==2.21.0 \
      numpy==2.4.6 safetensors matplotlib >"$into/log" 2>&1; then
      say "the tests that need torch are skipped: it could not be had from PyPI ($(grep -m1 '^ERROR' "$into/log" || tail -n1 "$into/log"))"
      rm -rf "$into"
      exit 0
    fi
    touch "$into/complete"
  fi
  echo "$into/bin/python3"
  exit 0
fi
build=${1:-$top/build}
into=$build/python-packages
mark=$into/nanobind-2.15.0-numpy-2.4.6-tokenizers-0.22.2
if [ ! -e "$mark" ]; then
  mkdir -p "$build"
  folder=$(mktemp -d "$build/python-packages.XXXXXX")
  trap 'rm -rf "$folder"' EXIT
  cat >"$folder/packages.txt" <<'P'
nanobind==2.15.0 --hash=sha256:91dae9305c6242cf63ab11a5c41594e234e7a22fd9fcc2c5c4ba80724abc1787
numpy==2.4.6
  --hash=sha256:89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93
  --hash=sha256:90f9849678c75fe7afa2d348ac842c168b0a4d3d61919687216dfc547976d853
tokenizers==0.22.2 --hash=sha256:369cc9fc8cc10cb24143873a0d95438bb8ee257bb80c71989e3ee290e8d72c67
jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67
markupsafe==3.0.3
  --hash=sha256:0bf2a864d67e76e5c9a34dc26ec616a66b9888e25e7b9460e1c76d3293bd9dbf
  --hash=sha256:d6dd0be5b5b189d31db7cda48b91d7e0a9795f31430b7f271219ab30f1d3ac9d
P
  # A requirement is one line.
  sed -i -e ':a' -e 'N' -e '$!ba' -e 's/\n  / /g' "$folder/packages.txt"
  if ! python3 -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --require-hashes \
    --only-binary=:all: --target "$folder/packages" --requirement "$folder/packages.txt" >"$folder/log" 2>&1; then
    say "the Python package is not built: nanobind and NumPy could not be had from PyPI ($(grep -m1 '^ERROR' "$folder/log" || tail -n1 "$folder/log"))"
    exit 0
  fi
  rm -rf "$into"
  mv "$folder/packages" "$into"
  touch "$mark"
fi
echo "$into"
