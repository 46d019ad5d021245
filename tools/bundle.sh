#!/usr/bin/env bash
# Packs what bench/gpu.sh needs, so that it runs on a machine that has a GPU, CUDA's libraries and python3 but nothing of
# this project: programs, the shared libraries that such a machine lacks, scripts and configurations.
#
#   tools/bundle.sh OUT_DIR [BUILD_DIR]      # BUILD_DIR: build, configured with -DZG_CUDA=ON
#   OUT_DIR/run.sh [FLAGS OF bench/gpu.sh]   # on the machine with the GPU
#
# It builds what is not up to date, with cuDNN's headers (tools/cudnn_headers.sh).
# Build for the GPU in question alone (-DCMAKE_CUDA_ARCHITECTURES=90 for H100 and H200): it is smaller. The system there must
# be at least as new as here: glibc is not packed, nor are CUDA's own libraries and the driver's.
set -euo pipefail
. "$(dirname "$0")/common.sh"

case "${1:-}" in
  ''|-h|--help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit "$([ -n "${1:-}" ] && echo 0 || echo 2)" ;;
esac
out=$1
build=${2:-$top/build}
limit=$((64 << 20))

programs=(ziggurat tests/zg_test_gpu tests/zg_test_gpu_store tests/zg_test_gpu_engine tests/zg_test_gpu_comm bench/bench_comm bench/bench_train_step bench/bench_gpu_kernels bench/bench_optimizer)
stays='^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util)\.so.*|lib(cuda|cudart|cublas|cublasLt|cudnn.*|cufile|nvrtc.*|nvJitLink|nvToolsExt|nccl)\.so.*)$'

"$top/tools/cudnn_headers.sh" "$build"
cmake "$build" >/dev/null || die "cmake $build failed" "cmake --preset release -DZG_CUDA=ON"
ninja -C "$build" "${programs[@]##*/}" >&2

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/bin" "$stage/lib" "$stage/bench" "$out"
for program in "${programs[@]}"; do
  file=$build/$program
  cp -L "$file" "$stage/bin/"
  while read -r name arrow place _; do
    [ "$arrow" = "=>" ] || continue
    [[ $name =~ $stays ]] && continue
    [ "$place" != not ] || die "$file needs $name, which is not here"
    cp -Ln "$place" "$stage/lib/$name"
  done < <(ldd "$file")
done
strip --strip-unneeded "$stage"/bin/* "$stage"/lib/*
cp "$top"/bench/gpu*.py "$top"/bench/gpu.sh "$top"/bench/pytorch_gpu.py "$top"/bench/pytorch_gpt2.py "$top"/bench/serve.py "$stage/bench/"
mkdir -p "$stage/configs"
cp "$top"/configs/bench-*.json "$top"/configs/quickstart.json "$stage/configs/"
mkdir -p "$stage/tests/reference"
cp "$top"/tests/reference/*.safetensors "$stage/tests/reference/"
git -C "$top" describe --always --dirty >"$stage/COMMIT" 2>/dev/null || echo unknown >"$stage/COMMIT"
# The programs have most of their code in common: a window that spans them all stores it once.
tar -C "$stage" -cf - . | xz --lzma2=preset=3,dict=256MiB >"$out/bundle.tar.xz"

cat >"$out/run.sh" <<'R'
#!/usr/bin/env bash
# Unpacks the bundle beside this file, once, and runs its bench/gpu.sh with the flags given.
#
#   run.sh [OUT_DIR] [flags of bench/gpu.sh]
#   run.sh --exec PROGRAM [flags]              one of its programs alone
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sum=$(cksum <"$here/bundle.tar.xz" | tr ' ' -)
place=${ZG_BUNDLE_DIR:-${TMPDIR:-/tmp}/zg-bundle-$sum}
if [ ! -f "$place/.unpacked" ]; then
  mkdir -p "$place"
  tar -C "$place" -xJf "$here/bundle.tar.xz"
  touch "$place/.unpacked"
fi
if [ "${1:-}" = --exec ]; then
  program=$2
  shift 2
  paths=$(cd "$place/bench" && "${PYTHON:-python3}" -c 'import gpu_support; print(gpu_support.library_path())')
  export LD_LIBRARY_PATH=$paths ZG_REFERENCE_DIR=$place/tests/reference
  exec "$place/bin/$program" "$@"
fi
exec "$place/bench/gpu.sh" "$@"
R
chmod +x "$out/run.sh"
size=$(stat -c %s "$out/bundle.tar.xz")
say "$out/bundle.tar.xz: $((size >> 20)) MiB; unpacked: $(du -sh "$stage" | cut -f1)"
for program in "${programs[@]}"; do say "  $(du -h "$stage/bin/${program##*/}" | cut -f1)  ${program##*/}"; done
[ "$size" -lt "$limit" ] || die "the bundle is larger than $((limit >> 20)) MiB" "build for one architecture: -DCMAKE_CUDA_ARCHITECTURES=90"
