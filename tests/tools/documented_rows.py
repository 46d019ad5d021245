"""The table of documented_commands.py: which commands documents may name, and how each is run by the tests, or why not.

A new command in a document needs a row, or has to match a pattern of one. A row is as small as it can be: all that it
runs together takes a second or two.
"""
import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Row:
    """What is done with the documented commands of one of these patterns (`*` is any text) that no row before has.

    Each is run as it is documented, but for what `replace` and `set` change: a word for a word, and the values of
    options, which are added where a document does not name them (True: an option without a value). `why` says why it
    is not run; its options must exist all the same. In texts `{root}` is the tree, `{build}` its build folder, `{here}`
    the folder of the run, and /mnt/nvme0 and /mnt/nvme1 are drives in it, on which nothing may be left.
    """
    name: str  # of the test
    commands: tuple
    why: str = ""
    replace: dict = dataclasses.field(default_factory=dict)
    set: dict = dataclasses.field(default_factory=dict)
    more: str = ""  # words at the end
    instead: tuple = ()  # commands that are run in place of a synopsis, which has no values
    before: tuple = ()  # commands that make what these need
    files: dict = dataclasses.field(default_factory=dict)  # to be there, with their contents; they may be run
    expect: tuple = ()  # patterns, each of which something that is said matches
    unseen: tuple = ()  # modules of Python that cannot be imported
    code: int = 0  # what they end with
    directory: str = "."  # where they are run
    needs: str = ""  # io_uring: skipped where that does not work
    seconds: int = 90  # for one of them, with others beside it
    foreign: bool = False  # options are those of other people's programs, and are not looked up


# A program, and what says its options, where that is not `PROGRAM --help`; "source FILE": it cannot be asked here.
HELPS = {
    "ziggurat": "ziggurat --help",
    "ziggurat train": "ziggurat train --help",
    "ziggurat generate": "ziggurat generate --help",
    "ziggurat eval": "ziggurat eval --help",
    "ziggurat plan": "ziggurat plan --help",
    "ziggurat probe": "ziggurat probe --help",
    "ziggurat io-bench": "ziggurat io-bench --help",
    "ziggurat io-tune": "ziggurat io-tune --help",
    "ziggurat trace": "ziggurat trace --help ; ziggurat trace record --help ; ziggurat trace show --help ; "
                      "ziggurat trace replay --help",
    "ziggurat checkpoint": "ziggurat checkpoint --help ; ziggurat checkpoint list --help ; "
                           "ziggurat checkpoint show --help ; ziggurat checkpoint verify --help ; "
                           "ziggurat checkpoint discard --help ; ziggurat checkpoint export --help ; "
                           "ziggurat checkpoint import --help",
    "tokenise.py": "python bench/tokenise.py --help",
    "generate.py": "python bench/generate.py --help",
    "qlora.py": "python bench/qlora.py --help",
    "experts.py": "python bench/experts.py --help",
    "checkpoint_doors.py": "python tools/checkpoint_doors.py --help ; python tools/checkpoint_doors.py from-dcp --help",
    "ziggurat config": "ziggurat config --help ; ziggurat config keys --help",
    "config_docs.py": "tools/config_docs.py --help",
    "what_fits.py": "tools/what_fits.py --help",
    "gpt2_124m.py": "python bench/gpt2_124m.py --help",
    "overlap.py": "python bench/overlap.py --help",
    "io_vs_fio.py": "python bench/io_vs_fio.py --help",
    "io_default_depth.py": "python bench/io_default_depth.py --help",
    "same_bits.py": "python bench/same_bits.py --help",
    "python_optimizer.py": "python bench/python_optimizer.py --help",
    "python_activations.py": "python bench/python_activations.py --help",
    "offload.py": "python bench/offload.py --help",
    "checkpoints.py": "python bench/checkpoints.py --help",
    "bench_kernels": "bench_kernels --help",
    "gpu.sh": "bench/gpu.sh --help",
    "pytorch_gpt2.py": "source bench/pytorch_gpt2.py",  # without torch it only says so
    "pytorch_gpu.py": "python bench/pytorch_gpu.py --help",
    "make_reference.py": "source tests/reference/make_reference.py",
    "make_tokenizers.py": "python tests/reference/make_tokenizers.py --help",
    "make_sentencepiece.py": "python tests/reference/make_sentencepiece.py --help",
    "make_unicode_tables.py": "python tools/make_unicode_tables.py --help",
    "prepare.py": "tools/prepare.py --help",
    "make_optimizers.py": "source tests/reference/make_optimizers.py",
    "make_ranks.py": "source tests/reference/make_ranks.py",
    "make_parts.py": "source tests/reference/make_parts.py",
    "make_families.py": "source tests/reference/make_families.py",
    "load_family.py": "source tests/reference/load_family.py",
    "make_lora.py": "source tests/reference/make_lora.py",
    "make_lora_targets.py": "source tests/reference/make_lora_targets.py",
    "load_adapter.py": "source tests/reference/load_adapter.py",
    "make_chats.py": "source tests/reference/make_chats.py",
    "random_models.py": "source tests/reference/random/random_models.py",
    "random_texts.py": "source tests/reference/random/random_texts.py",
    "mutate.py": "python tests/tools/mutate.py --help",
    "whole_matrix.py": "python tests/tools/whole_matrix.py --help",
    "ranks_efficiency.py": "python bench/ranks_efficiency.py --help",
    "ranks_nvme.py": "python bench/ranks_nvme.py --help",
    "documented_commands.py": "python tests/tools/documented_commands.py --help",
    "quickstart.sh": "tools/quickstart.sh --help",
    "test.sh": "tools/test.sh --help",
    "bundle.sh": "tools/bundle.sh --help",
    "cudnn_headers.sh": "tools/cudnn_headers.sh --help",
    "python_packages.sh": "tools/python_packages.sh --help",
    "wheel.sh": "tools/wheel.sh --help",
    "ptxas.sh": "tools/ptxas.sh --help",
    "io_stream": "source tools/examples/io_stream.cpp",
    "store_stream": "source tools/examples/store_stream.cpp",
    "store_c": "source tools/examples/store_c.c",
    "cmake": "cmake --help ; cmake --install ; cmake --build",
}

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void.\n" * 200
TOKENIZER = (pathlib.Path(__file__).parents[1] / "reference/tokenizers/gpt2.json").read_text()
BOOK = {"text.txt": TEXT, "build/quickstart/bible.txt": TEXT}
# A configuration's model in small, and one step: what takes the time is the measuring of the machine before it.
MODEL = ("--set model.n_layer=1 --set model.n_embd=32 --set model.n_head=2 --set data.seq_len=32 "
         "--set train_batch_size=2 --set train_micro_batch_size_per_gpu=2")
SMALL = (f"--devices host {MODEL} --set eval.every=0 --set eval.batches=1 --set data.train=text.txt "
         "--set sample.tokens=4")
TRAIN = f"ziggurat train configs/quickstart.json --steps 1 {SMALL}"
CHECKPOINT = "--set checkpoint.every=100"
NO_GPT2_FILES = "--set data.train=text.txt --set data.tokenizer=bytes --set data.validation=0"
# io-bench and io-tune in small.
PIECE = {"--size": "1MiB", "--seconds": "0.05"}
TUNE = {"--size": "16MiB", "--seconds": "1"}

# Stands for `fio`: says what fio says of a run of half a second.
FIO = """#!/usr/bin/env python3
import json, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print("fio-stand-in"))
side = {"io_bytes": 1 << 20, "runtime": 500, "clat_ns": {"percentile": {"99.000000": 1000}}}
cpu = {"usr_cpu": 1, "sys_cpu": 1, "job_runtime": 500}
print(json.dumps({"jobs": [{"error": 0, "read": side, "write": side} | cpu]}))
"""
# Stands for a Python with PyTorch: imports it, and answers as bench/pytorch_gpt2.py --serve does.
TORCH = """#!/usr/bin/env python3
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)
assert sys.argv[1].endswith("bench/pytorch_gpt2.py") and "--serve" in sys.argv
print(json.dumps({"event": "ready"}), flush=True)
for line in sys.stdin:
    print(json.dumps({"event": "step", "step_s": 0.01}), flush=True)
"""
NO_TORCH = "#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n"

# What nvcc's assembler says of one kernel.
PTXAS = """ptxas info    : Compiling entry function 'k' for 'sm_90'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, 32 bytes smem
"""

# What cuobjdump says of a kernel: a loop of four instructions.
SASS = """arch = sm_80
\t\tFunction : k
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.16816.F32 R12, R4, R7, R12 ;
        /*0040*/              @!P0 BRA 0x10 ;
"""

BUILDS = "builds the tree, which has been done when this runs"
INSTALL_TEST = "the test install.find_package does it"
NEEDS_A_GPU = "runs the suites of a GPU; bench/gpu_test.py tries the driver"
NAMED = "names a program whose commands have rows of their own"

ROWS = (
    # Training. The text is a small one: that of the documents is fetched by tools/quickstart.sh.
    Row("train_gpus", ("ziggurat train CONFIG --devices cuda:all",), why="needs several GPUs; "
        "tests/cuda/comm/emulated_train_test.cpp trains so on fakes"),
    Row("train_pipeline", ("ziggurat train configs/quickstart.json --devices host:2 --set parallel.pipeline=2 --plan",),
        files=BOOK),
    Row("train_experts", ("ziggurat train configs/experts.json",), files={"README.md": TEXT}, set={"--steps": "1"},
        expect=("Qwen3-MoE from scratch", "largest load")),
    Row("train_expert_ranks", ("ziggurat train configs/experts.json --devices host:2 --set parallel.experts=2",),
        files={"README.md": TEXT}, set={"--steps": "1"},
        expect=("4 of each layer on each of 2 ranks", r"experts +1\.3 MiB +1\.3 MiB +exact")),
    Row("train_ranks", ("ziggurat train configs/quickstart.json --devices host:2",), files=BOOK, set={"--steps": "1"},
        more=SMALL.replace("--devices host ", "").replace("per_gpu=2", "per_gpu=1")),
    Row("train_parts", ("ziggurat train configs/quickstart.json --devices host:2 --set parallel.tensor=2 "
                        "--set parallel.sequence=true",), files=BOOK, set={"--steps": "1"},
        more=SMALL.replace("--devices host ", "")),
    Row("train_dropout", ("ziggurat train configs/quickstart.json --set model.dropout.embedding=0.1 "
                          "--set model.dropout.residual=0.1",), files=BOOK, set={"--steps": "1"}, more=SMALL),
    Row("train_context", ("ziggurat train configs/quickstart.json --devices host:2 --set parallel.context=2",), files=BOOK,
        set={"--steps": "1"}, more=SMALL.replace("--devices host ", "").replace("per_gpu=2", "per_gpu=1")),
    Row("train_grid", ("ziggurat train configs/quickstart.json --devices host:4 --set parallel.tensor=2 "
                       "--set parallel.pipeline=2 --plan",), files=BOOK),
    Row("train_processes", (
        "mpirun -n 2 ziggurat train configs/quickstart.json --devices host:2 --set train_micro_batch_size_per_gpu=4",
        "mpirun -n 2 ziggurat train configs/quickstart.json --devices host", "mpirun --bind-to none",
        "mpirun --mca odls_base_sigkill_timeout 30", "mpirun --map-by ppr:1:node",
        "mpirun -n 2 --mca * ziggurat train configs/quickstart.json --devices host",
        "kill -USR2 PID"), why="tests/cli trains under it", foreign=True),
    Row("train_checkpoints", ("ziggurat train configs/quickstart.json --set checkpoint.every=100",), files=BOOK,
        set={"--steps": "1"}, more=SMALL, expect=("checkpoint runs/quickstart/checkpoints/0001-step-1",)),
    Row("train_resume", ("ziggurat train configs/quickstart.json --set checkpoint.every=100 --resume",), files=BOOK,
        before=(f"{TRAIN} {CHECKPOINT}",), set={"--steps": "1"}, more=SMALL, expect=("resumes from runs/quickstart",)),
    Row("checkpoint", ("ziggurat checkpoint list runs/quickstart", "ziggurat checkpoint show runs/quickstart *",
                       "ziggurat checkpoint verify runs/quickstart"), files=BOOK,
        before=(f"{TRAIN} {CHECKPOINT}",)),
    Row("checkpoint_discard", ("ziggurat checkpoint discard runs/quickstart/*",), files=BOOK,
        before=(f"{TRAIN} {CHECKPOINT}",), expect=("removed runs/quickstart/checkpoints/0001-step-1",),
        replace={"runs/quickstart/checkpoints/0003-step-300": "runs/quickstart/checkpoints/0001-step-1"}),
    Row("checkpoint_discard_all", ("ziggurat checkpoint discard --all runs/quickstart",), files=BOOK,
        before=(f"{TRAIN} {CHECKPOINT}",), expect=("removed runs/quickstart/checkpoints/0001-step-1",)),
    Row("checkpoint_export", ("ziggurat checkpoint export runs/quickstart *",), files=BOOK,
        before=(f"{TRAIN} {CHECKPOINT}",), replace={"/mnt/backup/quickstart": "copies"}, expect=("all hashes agree",)),
    Row("checkpoint_import", ("ziggurat checkpoint import theirs.safetensors *",), files={**BOOK, "theirs.safetensors": ""},
        before=(f"{TRAIN} {CHECKPOINT}",), code=2, expect=("theirs.safetensors",)),
    Row("checkpoint_doors", ("tools/checkpoint_doors.py *",), unseen=("torch",), code=3,
        expect=("torch cannot be imported",)),
    Row("checkpoint_doors_alone", ("tools/checkpoint_doors.py", "tests/tools/checkpoint_doors_test.py"),
        why="tools.checkpoint_doors tests the one with the other"),
    Row("train", ("ziggurat train configs/quickstart.json", "ziggurat train configs/quickstart.json *"), files=BOOK,
        replace={"optimizer.state=STATE": "optimizer.state=bf16",
                 "checkpoint.export.path=/mnt/backup/quickstart": "checkpoint.export.path=copies"},
        set={"--steps": "1"}, more=SMALL),
    Row("train_again", ("ziggurat train runs/quickstart/config.json",), files=BOOK, before=(TRAIN,)),
    Row("train_deepspeed", ("ziggurat train configs/tiny.json configs/deepspeed/zero3_nvme.json *",), files=BOOK,
        set={"--steps": "1"}, more="--devices host --set zero_optimization.offload_param.nvme_path=/mnt/nvme0 "
                                   "--set zero_optimization.offload_optimizer.nvme_path=/mnt/nvme0"),
    Row("train_overrides", ("ziggurat train configs/tiny.json my-deepspeed.json *",), more="--devices host",
        files={"my-deepspeed.json": '{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}'},
        replace={"steps=100": "steps=1", "tiers.nvme.0.path=/mnt/fast": "tiers.nvme.0.path=/mnt/nvme0"}),
    Row("train_characters", ("ziggurat train configs/shakespeare-char.json *",),
        files={"tinyshakespeare.txt": TEXT, "build/shakespeare/a-folder": ""},
        more="--devices host --steps 1 --set eval.every=0 --set eval.batches=1 --set sample.tokens=4"),
    Row("train_small_state", ("ziggurat train configs/gpt2-124m-small-state.json *",),
        why="needs the weights of GPT-2; tests/train reads the configuration"),
    Row("train_finetune", ("ziggurat train configs/finetune/*",),
        why="needs a model of billions of parameters; tests/train plans each of these configurations"),
    Row("train_plan", ("ziggurat train configs/gpt2-124m.json --plan",), files=BOOK,
        more=f"--devices host {NO_GPT2_FILES}"),
    Row("train_help_parallel", ("ziggurat train --help-parallel",),
        expect=("Refused, before anything is allocated:",)),
    Row("train_synopsis", ("ziggurat train CONFIG... *",), files=BOOK, instead=(
        f"{TRAIN} --threads 1 --trace trace.json --stall-seconds 5 -v", f"{TRAIN} --plan")),
    Row("generate", ("ziggurat generate --model runs/quickstart/model *",), files=BOOK, before=(TRAIN,),
        set={"--tokens": "4"}),
    Row("generate_synopsis", ("ziggurat generate --model DIR *",), files=BOOK, before=(TRAIN,), instead=(
        "ziggurat generate --model runs/quickstart/model --prompt-ids 1,2,3 --tokens 2 --temperature 0.5 --top-k 3 "
        "--seed 2 --ids --past-the-end --memory 64MiB",)),
    Row("trained_elsewhere", (
        "ziggurat generate --model runs/qwen3-8b/model *", "ziggurat eval --model runs/qwen3-8b/model *",
        "ziggurat generate --model Llama-3.1-70B *", "ziggurat generate --model Qwen3-8B *", "ziggurat eval --model Qwen3-8B *",
        "ziggurat generate --model models/Qwen3-8B *", "ziggurat generate --model models/Llama-3.1-70B-nf4 *",
        "ziggurat merge *", "ziggurat quantize", "ziggurat quantize *"),
        why="needs a model of billions of parameters"),
    Row("eval", ("ziggurat eval --model runs/quickstart/model *", "ziggurat eval --model DIR *"), files=BOOK | {"held-out.txt": TEXT},
        before=(TRAIN,), instead=("ziggurat eval --model runs/quickstart/model --data held-out.txt --each --json --context 16",),
        expect=('"perplexity"',)),

    # Measuring drives and the machine.
    Row("plan", ("ziggurat plan configs/finetune/llama-3.1-8b.json *", "ziggurat plan tests/reference/configs/*",
                 "ziggurat plan configs/bench-llama-7b-gpu.json *"),
        expect=("it fits|\"fits\": true",)),
    Row("plan_synopsis", ("ziggurat plan CONFIG... *", "ziggurat plan MODEL *"),
        instead=("ziggurat plan configs/tiny.json --machine h100-1 --devices 1 --tokens 10B --what-if nvme+1 --json",)),
    Row("what_fits", ("tools/what_fits.py *",), instead=("tools/what_fits.py --check",)),
    Row("plan_models", ("ziggurat plan models/*", "ziggurat plan"), why="the models are fetched by whoever has room"),
    Row("probe_machine", ("ziggurat probe /mnt/nvme0 --write-machine *",),
        instead=("ziggurat probe /mnt/nvme0 --write-machine here.json --size 1MiB",), expect=("here.json",)),
    Row("probe", ("ziggurat probe", "ziggurat probe /mnt/nvme0 *", "ziggurat probe DIR",
                  "ziggurat probe [DIRECTORY...] *"),
        instead=("ziggurat probe /mnt/nvme0 /mnt/nvme1 --size 1MiB",)),
    Row("io_bench_copy", ("ziggurat io-bench --op copy --file data.bin --path /mnt/nvme0*",),
        files={"data.bin": "0123456789abcdef" * 65536}),
    Row("io_bench", ("ziggurat io-bench --path /mnt/nvme0", "ziggurat io-bench --path /mnt/nvme0 *",
                     "ziggurat io-bench --path . *"), set=PIECE, directory="drives/nvme1"),
    Row("io_bench_file", ("ziggurat io-bench --file data.bin *",), files={"data.bin": "0123456789abcdef" * 65536},
        set={"--seconds": "0.05"}),
    Row("io_bench_synopsis", ("ziggurat io-bench --path DIR... *",), instead=(
        "ziggurat io-bench --path /mnt/nvme0 --op mixed --block-size 64KiB --queue-depth 4 --seconds 0.05 --size 1MiB "
        "--backend threads --verify on --json",)),
    Row("io_tune", ("ziggurat io-tune --path /mnt/nvme0", "ziggurat io-tune --path /mnt/nvme0 --path /mnt/nvme1 *"),
        set=TUNE),
    Row("io_tune_uring", ("ziggurat io-tune --path /mnt/nvme0 --for read --backend io_uring *",), set=TUNE,
        needs="io_uring"),
    Row("io_tune_synopsis", ("ziggurat io-tune --path DIR... *",), instead=(
        "ziggurat io-tune --path /mnt/nvme0 --seconds 1 --size 16MiB --for write --output tuned --json",)),

    # Traces.
    Row("trace_record", ("ziggurat trace record configs/quickstart.json *",
                         "ziggurat trace record configs/tiny.json *"),
        files=BOOK, more="--set devices=host"),
    Row("trace_record_large", ("ziggurat trace record configs/gpt2-124m.json *",), files=BOOK,
        more=f"--set devices=host {NO_GPT2_FILES}"),
    Row("trace_show", ("ziggurat trace show *",), before=(
        "ziggurat trace record configs/tiny.json --set devices=host -o step.json",
        "ziggurat trace record configs/tiny.json --set devices=host -o step.trace")),
    Row("trace_replay", ("ziggurat trace replay step.json *", "ziggurat trace replay step.trace *"), files=BOOK,
        before=(
        "ziggurat trace record configs/quickstart.json --set devices=host -o step.json",
        "ziggurat trace record configs/quickstart.json --set devices=host -o step.trace")),
    Row("trace_synopsis", ("ziggurat trace record CONFIG... *",), why="the rows before run all of it"),
    Row("trace_direct", ("ziggurat trace replay --direct",), files=BOOK, before=(
        "ziggurat trace record configs/quickstart.json --set devices=host -o step.json",),
        instead=("ziggurat trace replay step.json --host 25% --direct",)),
    Row("signals", ("kill -USR1 PID", "kill -9"), why="tests/cli and tests/io send them", foreign=True),
    Row("names", ("ziggurat train", "ziggurat io-bench", "ziggurat io-tune", "ziggurat trace",
                  "ziggurat checkpoint", "build/ziggurat",
                  "bench_drive_bound", "bench_gpu_kernels", "bench_io_priority", "bench_optimizer",
                  "bench_store_overlap", "bench_store_stream", "bench_train_step", "bench_update_stream",
                  "tools/ptxas.sh", "tests/tools/documented_rows.py", "tests/tools/documents.py"), why=NAMED),

    # Benchmarks.
    Row("tokenise", ("bench_tokenise", "bench_tokenise *"), files={"book.txt": TEXT, "tokens/tokenizer.json": TOKENIZER},
        instead=("bench_tokenise --tokenizer tokens --text book.txt --seconds 0.05 --threads 2",), expect=('"tokens":',)),
    Row("tokenise_beside_others", ("bench/tokenise.py *",),
        why="needs Hugging Face's tokenizers; bench_tokenise, which it runs, has a row"),
    Row("generate_beside_others", ("bench/generate.py", "bench/generate.py *"), why="needs PyTorch and transformers"),
    Row("eviction_replay", ("bench_eviction_replay", "bench_eviction_replay *"), instead=(
        "bench_eviction_replay --only gpt2-124m-deferred --rounds 1 --out replay",)),
    Row("gpu_kernels", ("bench_gpu_kernels *",), instead=(
        "bench_gpu_kernels --device host --tiny --rounds 1 --seconds 3 --only copies,attention,ops",)),
    Row("host_kernels", ("bench_kernels", "bench_kernels *"), instead=(
        "bench_kernels --benchmark_min_time=0.001",), expect=("attention_backward/bf16/.*share_of_roof=",)),
    Row("io_engine", ("bench_io_engine", "bench_io_engine *"), instead=(
        "bench_io_engine --benchmark_min_time=0.001 --benchmark_filter=block:131072",),
        expect=("engine/ram/completion/depth:8/.*per_cpu_second=",)),
    Row("drive_bound", ("bench_drive_bound *",), instead=(
        "bench_drive_bound --tiny --scenario half,two --clip none --depths 8 --out bound.json",)),
    Row("io_priority", ("bench_io_priority *",), instead=(
        "bench_io_priority --rounds 1 --seconds 0.1", "bench_io_priority --path /mnt/nvme0 --rounds 1 --seconds 0.1")),
    Row("optimizer", ("bench_optimizer --*",), set={"--repeats": "1", "--params": "65536"}),
    Row("optimizer_synopsis", ("bench_optimizer [*",), instead=(
        "bench_optimizer --params 65536 --repeats 1 --threads 1 --benchmark_filter=adamw_fp32 --benchmark_format=json",),
        expect=('"ns_per_param": ', '"share_of_roof": ')),
    Row("store_hot_path", ("bench_store_hot_path", "bench_store_hot_path *"), instead=(
        "bench_store_hot_path --benchmark_min_time=0.001 --benchmark_enable_random_interleaving=true "
        "--benchmark_repetitions=2",), expect=("read_along_program/.*allocations=.* s_per_pair=",)),
    Row("store_overlap", ("bench_store_overlap --rounds *",),
        set={"--steps": "1", "--tensors": "24", "--tensor": "64KiB", "--compute-ms": "0.2"}),
    Row("store_overlap_synopsis", ("bench_store_overlap [*",), instead=(
        "bench_store_overlap --rounds 1 --steps 1 --tensors 24 --tensor 64KiB --compute-ms 0.2 --busy --shares 1 "
        "--only host --dump",)),
    Row("store_step", ("bench_store_step", "bench_store_step *"), instead=(
        "bench_store_step --rounds 1 --steps 1 --step-seconds 0.1 --segment 16KiB --io-share 0.9 --host 0.6 "
        "--read-ahead 0.25 --policy next-use,least",)),
    Row("store_timed", ("bench_store_timed", "bench_store_timed *"), instead=(
        "bench_store_timed --programs 2 --rounds 1 --step-seconds 0.1 --seed 1 --gains 1",)),
    Row("store_stream", ("bench_store_stream --path DIR --rounds *",), replace={"DIR": "/mnt/nvme0"},
        set={"--rounds": "1", "--size": "32MiB", "--host": "8MiB", "--device": "2MiB", "--tensor": "256KiB"}),
    Row("store_stream_synopsis", ("bench_store_stream --path DIR [*",), instead=(
        "bench_store_stream --path /mnt/nvme0 --rounds 1 --size 32MiB --host 8MiB --device 2MiB --tensor 256KiB "
        "--block-size 64KiB --queue-depth 4 --checksums on",)),
    Row("comm_gpus", ("bench_comm --gpus *",), why="needs several GPUs"),
    Row("comm", ("bench_comm", "bench_comm *"), instead=("bench_comm --ranks 2 --mib 1 --rounds 1",)),
    Row("comm_mpi", ("mpirun", "mpirun -n 2 bench_comm *"), why="ctest runs the suite of collectives under it",
        foreign=True),
    Row("striping", ("bench_striping", "bench_striping *"), instead=(
        "bench_striping --unit 100000000 --extent 65536 --extents 64 --in-flight 8 --before 2 --after 0.2 "
        "--reading 0.1",)),
    Row("train_step", ("bench_train_step *",), instead=(
        f"bench_train_step configs/bench-gpt2-124m.json {MODEL} --set devices=host --set model.vocab_size=300 "
        "--set model.n_positions=32 --steps 1 --trace trace.json --work work",)),
    Row("update_stream", ("bench_update_stream --path DIR --rounds *",), replace={"DIR": "/mnt/nvme0"},
        set={"--rounds": "1", "--updates": "1", "--parameters": "4194304", "--host": "32MiB", "--io-seconds": "0.1"}),
    Row("update_stream_synopsis", ("bench_update_stream --path DIR [*",), instead=(
        "bench_update_stream --path /mnt/nvme0 --parameters 4194304 --host 32MiB --read-ahead 0.25 --rounds 1 "
        "--updates 1 --io-seconds 0.1 --block-size 64KiB --queue-depth 4 --checksums off",)),

    # Benchmarks beside other people's programs, which stand-ins play here, or which are not there.
    Row("gpt2_124m", ("bench/gpt2_124m.py --torch-python PYTHON *",), replace={"PYTHON": "{here}/with-torch"},
        files={"with-torch": TORCH}, set={"--tiny": True, "--rounds": "1", "--steps": "1", "--nvme": "/mnt/nvme0"},
        expect=("torch fused / memory", "torch foreach / memory")),
    Row("gpt2_124m_synopsis", ("bench/gpt2_124m.py [*",), files={"without-torch": NO_TORCH}, instead=(
        "bench/gpt2_124m.py --tiny --rounds 1 --steps 1 --nvme /mnt/nvme0 --work work --out results.json "
        "--torch-python {here}/without-torch",),
        expect=("PyTorch is not compared: .*/without-torch cannot import torch .Module",)),
    Row("qlora", ("bench/qlora.py *",), instead=(
        "bench/qlora.py --dir base --size tiny --tokens 8 --steps 1 --device 8MiB --host 8MiB --out steps.md",
        "bench/qlora.py --dir base --size tiny-experts --tokens 8 --steps 1 --device 8MiB --host 8MiB",
        "bench/qlora.py --dir both --compare --size tiny --rounds 1 --steps 2 --device 8MiB --host 8MiB"),
        expect=("exact", "codes are .* times as fast")),
    Row("bench_experts", ("bench/experts.py *",), instead=(
        "bench/experts.py --dir work --size tiny --rounds 1 --steps 2 --out steps.md",),
        expect=("the mixture takes .* times the dense model's step",)),
    Row("overlap", ("bench/overlap.py", "bench/overlap.py *"), instead=(
        "bench/overlap.py --model tiny --rounds 1 --steps 1 --warm-up 1 --case early --trace-dir traces "
        "--out out.json",)),
    Row("io_vs_fio", ("bench/io_vs_fio.py --file *",), needs="io_uring", files={"stand-in-fio": FIO}, instead=(
        "bench/io_vs_fio.py --file {here}/file.bin --size 4MiB --seconds 0.05 --ramp 0.01 --rounds 1 --block 65536 "
        "--depth 4 --fio {here}/stand-in-fio --out fio.json",
        "bench/io_vs_fio.py --file {here}/file.bin --size 4MiB --ramp 0.01 --quick --op read --fio {here}/no-fio"),
        expect=("fio-stand-in", "ours / fio: throughput", "fio is not compared: .*/no-fio is not installed")),
    Row("io_default_depth", ("bench/io_default_depth.py --file *",), needs="io_uring", files={"stand-in-fio": FIO}, instead=(
        "bench/io_default_depth.py --file {here}/file.bin --size 8MiB --seconds 0.4 --ramp 0.01 --rounds 1 --block 65536 "
        "--depths 4 --fio {here}/stand-in-fio --out depth.json",
        "bench/io_default_depth.py --file {here}/file.bin --size 8MiB --seconds 0.4 --ramp 0.01 --rounds 1 --block 65536 "
        "--depths 4 --op read --fio {here}/no-fio"),
        expect=("default / best fixed", "fio is not compared: .*/no-fio is not installed")),
    Row("python_optimizer", ("bench/python_optimizer.py",
                             "python bench/python_optimizer.py *", "python store_stream.py *",
                             "python train_torch.py *", "python finetune_trainer.py *",
                             "bench/python_activations.py *", "python bench/python_activations.py *",
                             "bench/offload.py *"), foreign=True,
        why="needs the Python package, and torch"),
    Row("same_bits", ("bench/same_bits.py *",), instead=(
        "bench/same_bits.py {build}/ziggurat {build}/ziggurat --only Lion --out same.json",),
        expect=("same     Lion", "1 of 1 the same in losses, weights and bytes")),
    Row("ranks_efficiency", ("bench/ranks_efficiency.py", "bench/ranks_efficiency.py *"), instead=(
        "bench/ranks_efficiency.py --what efficiency --model tiny --rounds 1 --steps 1 --out efficiency.json",),
        expect=(" of 1 rank",)),
    Row("ranks_nvme", ("bench/ranks_nvme.py *",), instead=(
        "bench/ranks_nvme.py --model tiny --ranks 1,2 --rounds 1 --steps 1 --out ranks.json",),
        expect=("2 rank\\(s\\): step .* of 1 rank\\(s\\)",)),
    Row("checkpoint_costs", ("bench/checkpoints.py", "bench/checkpoints.py *"), instead=(
        "bench/checkpoints.py --config {root}/configs/tiny.json --steps 3 --every 2 --rounds 1 "
        "--torch-python {here}/without-torch --out costs.json",), files={"without-torch": NO_TORCH},
        expect=("PyTorch is not compared: .*No module named torch", "stands still", "with one each 2 steps")),
    Row("pytorch", ("python pytorch_gpt2.py *", "python pytorch_gpu.py *"), directory="bench", unseen=("torch",),
        code=3, expect=("pytorch_gpt2.py: torch cannot be imported .*; there is no PyTorch baseline",
                "pytorch_gpu.py: torch cannot be imported .*; there is no PyTorch baseline")),
    Row("gpu", ("bench/gpu.sh --dry-run [OUT_DIR]",), unseen=("torch",), expect=("PyTorch is not compared",), instead=(
        "bench/gpu.sh --dry-run gpu --disk /mnt/nvme0",)),
    Row("gpu_stages", ("bench/gpu.sh", "bench/gpu.sh --stages graphs", "bench/gpu.sh [OUT_DIR] *"), why=NEEDS_A_GPU),
    Row("bundle", ("tools/bundle.sh OUT_DIR*", "OUT_DIR/run.sh*"), why=NEEDS_A_GPU),

    # Tools.
    Row("quickstart_script", ("tools/quickstart.sh", "tools/quickstart.sh *"), why="installs packages"),
    Row("test_script", ("tools/test.sh", "tools/test.sh *"), why="builds everything and runs these tests"),
    Row("common", ("tools/common.sh",), why="is read by the scripts beside it"),
    Row("cudnn_headers", ("tools/cudnn_headers.sh", "tools/cudnn_headers.sh *"), why="fetches packages"),
    Row("python_packages", ("tools/python_packages.sh", "tools/python_packages.sh *"), why="fetches packages"),
    Row("wheel", ("tools/wheel.sh *",), why="builds the package, and fetches packages"),
    Row("ptxas", ("tools/ptxas.sh *",), why="needs nvcc"),
    Row("check_layers", ("tests/tools/check_layers.py", "check_layers.py *", "tests/tools/check_temporaries.py",
                         "check_temporaries.py *"), why="is a test itself: layers.includes, tools.loops_over_temporaries",
        foreign=True),
    Row("documented_commands", ("documented_commands.py *",), why="is this program"),
    Row("whole_matrix", ("tests/tools/whole_matrix.py", "tests/tools/whole_matrix.py *"), why="takes an hour"),
    Row("mutants", ("tests/tools/mutate.py", "tests/tools/mutate.py *"), why="builds the tests once more for each bug"),
    Row("config_keys", ("ziggurat config keys", "ziggurat config keys *"), instead=(
        "ziggurat config keys", "ziggurat config keys --section aio", "ziggurat config keys --section tiers --section "
        "tiers.nvme --format markdown"), expect=("aio.queues: whole number, 1 to 64", "\\| `tiers.nvme\\[\\].path` *")),
    Row("config_docs", ("tools/config_docs.py *",), instead=("tools/config_docs.py --check",)),
    Row("unicode_tables", ("venv/bin/python tools/make_unicode_tables.py",), why="needs unicodedata2 and tokenizers"),
    Row("ptxas_table", ("tools/ptxas_table.py *",), instead=("python tools/ptxas_table.py 90 13.0 abc1234 ptxas.log",),
        files={"ptxas.log": PTXAS}, expect=(r"\| `k` \| 40 \| 8 \| 4 \| 4 \| 32 \|",)),
    Row("ptxas_mix", ("tools/ptxas_mix.py", "tools/ptxas_mix.py *"), instead=("python tools/ptxas_mix.py sass.txt",),
        files={"sass.txt": SASS}, expect=(r"\| sm_80 \| `k` \| 4 \| 2 \| 1 \|.* \| 2.00 \| 16 \| 1.00, matrix \|",)),
    Row("reference", ("make_reference.py", "make_optimizers.py", "python make_reference.py --check",
                      "venv/bin/python tests/reference/make_reference.py --check", "make_ranks.py",
                      "python make_ranks.py", "make_parts.py", "python make_parts.py",
                      "venv/bin/python tests/reference/make_families.py", "python make_families.py *",
                      "python load_family.py *", "make_families.py", "load_family.py",
                      "venv/bin/python tests/reference/make_lora.py", "python make_lora.py *", "python make_lora_targets.py", "python make_codes.py", "python make_coded.py *",
                      "python load_adapter.py *", "venv/bin/python tests/reference/make_chats.py"),
        why="needs PyTorch, and makes files that lie in the tree"),
    Row("random", ("venv/bin/python tests/reference/random/*",),
        why="needs transformers; the tests random.models and random.texts run a few seeds"),
    Row("tokenizers", ("venv/bin/python tests/reference/make_tokenizers.py *",
                       "venv/bin/python tests/reference/make_sentencepiece.py"),
        why="needs Hugging Face's tokenizers, or SentencePiece's package"),
    Row("prepare", ("tools/prepare.py", "python3 tools/prepare.py *", "venv/bin/python tools/prepare.py *"),
        why="needs Hugging Face's tokenizers; the test tools.prepare runs it where they are"),
    Row("prepared", ("ziggurat train config.json --set data.train=data/train.bin",),
        why="of tokens that a person has prepared"),
    Row("reference_packages", ("python3 -m venv venv", "venv/bin/pip install *"), foreign=True,
        why="downloads packages"),
    Row("python_tests", ("python -c \"import ziggurat; *",), foreign=True,
        why="needs the Python package, whose own tests do the same"),
    Row("from_python", ("tests/store/c_api_ctypes.py",), why="is a test itself: store.c_api_from_python"),

    # Building.
    Row("configure", ("cmake --preset release", "cmake --preset release *", "cmake --preset asan *", "cmake -DZG_CUDA=ON",
                      "cmake -B build -DZG_PYTHON=ON *"), why=BUILDS),
    Row("build", ("ninja -C build", "ninja -C build *", "ninja -C /tmp/ziggurat"), why=BUILDS, foreign=True),
    Row("build_folders", ("build/dev", "build/asan", "build/tsan", "build/cuda"), why="names a folder"),
    Row("affinity", ("taskset",), why="names a program of others"),
    Row("tests", ("ctest --*", "build/tests/zg_test_* --gtest_*"), why="runs tests, of which this is one",
        foreign=True),
    Row("install", ("cmake --install build", "cmake --install /tmp/ziggurat *"), why=INSTALL_TEST),
    Row("examples_build", ("cmake -S ../.. -B /tmp/ziggurat *", "cmake -S . -B /tmp/examples *",
                           "cmake --build /tmp/examples"), why=INSTALL_TEST),
    Row("examples_run", ("/tmp/examples/io_stream *", "/tmp/examples/store_stream *", "io_stream *", "store_stream *",
                         "store_c"), why=INSTALL_TEST),
    Row("example_in_c", ("cc *", "/tmp/examples/store_c *", "store_c [*"), foreign=True, instead=(
        "cc {root}/tools/examples/store_c.c -I {root}/include -L {build} -lziggurat_store -o store_c",
        "env LD_LIBRARY_PATH={build} ./store_c --total 8 --host 4 --steps 2 /mnt/nvme0")),
)
