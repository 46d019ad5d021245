#!/usr/bin/env bash
# Tests and benchmarks of one GPU in one command. Builds nothing: it runs what a bundle (tools/bundle.sh) or the build tree
# has.
#
#   bench/gpu.sh [OUT_DIR] [--stages suite,gpt2-124m,...] [--continue] [--total 540] [--limit STAGE=SECONDS]... [--disk DIR]
#   bench/gpu.sh --dry-run [OUT_DIR]     the same on the processor, with tiny models: does all of it work?
#
# It begins with a table of the machine. Then stages, the most important first, each with a time limit inside the total; one
# that no longer fits is listed as not run, and a second command goes on with the rest (--continue, or --stages):
#   suite         the GPU's tests of ops and runtime, all of which must run
#   suite-store   the store's
#   bits          GPT-2 124M trained under several placements: the same losses and weights to the last bit?
#   gpt2-124m     training steps beside PyTorch's, in turns
#   copies        host <-> device beside cudaMemcpyAsync
#   gpt2-1.5b     as gpt2-124m, one program after the other, since both do not fit
#   kernels       every op with its share of the roof
#   llama-7b      6.7 billion parameters on 80 GB and on 16 GiB, against the least time that a step can take
#   ranks         two GPUs or more: communication over NCCL, and ZeRO-3 beside the processor's; with one it says so and passes
#   suite-engine  the tests that train, more than a thousand tiny runs
#   graphs        GPT-2 124M with operations as CUDA graphs, in large batches and in small ones
#   sanitizer     compute-sanitizer's memcheck and racecheck over the op tests
#   largest       the largest model that this machine holds takes a step
# OUT_DIR (default build/gpu) gets gpu.json and gpu.md, written anew after every stage, and the logs. All stages take four
# commands of at most 9 minutes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "bench/gpu.sh: $python is not here; name one with PYTHON=" >&2; exit 2; }
exec "$python" "$here/gpu.py" "$@"
