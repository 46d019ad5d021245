#!/usr/bin/env python3
"""Bugs that an engine for many ranks could have, each put into a copy of the tree: does a test turn red?

    tests/tools/seeded_bugs.py --work DIR [--only PART]... [--out FILE.md]
    tests/tools/seeded_bugs.py --work DIR --package BUILD/python [--python PYTHON] [--only PART] [--out FILE.md]
    tests/tools/seeded_bugs.py --check

A bug is a few replaced lines. The tracked files are copied to DIR, which is made, and built there once. Then each bug
is put in alone, the test programs that could see it are built, and their tests are run until the first one fails. A
table says which test turned red. With --package the bugs are those of the Python package: only its files in Python
change, its modules are taken from BUILD/python, and nothing is built; PYTHON has torch and the packages of the tests.

It takes a minute for each bug on two cores, so no test runs it; but one runs --check, which only looks whether each
text that is replaced is still there. The exit code is 1 where a bug was not seen.
"""
import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import seeded_python

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXECUTOR, ISSUE = "src/engine/step_executor.cpp", "src/engine/issue.cpp"
SCHEDULE, LAYOUT = "src/engine/schedule.cpp", "src/engine/layout.cpp"
PROGRAM, STAGE, PIPELINE = "src/engine/step_program.cpp", "src/engine/stage_schedule.cpp", "src/engine/pipeline.cpp"
OPERANDS, ELEMENTS = "src/engine/slot_operands.hpp", "src/engine/tile_elements.cpp"
COMM, TRAINER, RANK = "src/comm/host_comm.cpp", "src/train/trainer.cpp", "src/train/rank.cpp"
ATTENTION, HOST_ATTENTION = "src/model/block_attention.cpp", "kernels/host/attention.cpp"
SEQUENCE_PART = "include/ziggurat/model/sequence_part.hpp"
ENGINE = ("zg_test_engine", "Setups/Ranks.*:RanksIn*:Models/RanksMatrixOf.*/gpt2_untied")
CONTEXT = ("zg_test_engine", "Context*")
# The back end of GPUs, over fakes of CUDA and of NCCL.
NCCL = "src/comm/nccl_comm.cpp"
GPUS = ("zg_test_cuda_comm", "*Conformance*:Nccl*:Comm*")
NODE, PLAN = "src/train/node.cpp", "src/train/run_plan.cpp"
TRAIN = ("zg_test_train", "RanksOfARun.EveryStage*:TensorRuns.*")
CALL, HEAD, UNITS, MODEL = "src/model/call.hpp", "src/model/head.cpp", "src/model/units.cpp", "src/model/model.cpp"
PART = "src/model/part.cpp"
WEIGHTS, STATE = "src/engine/weight_ops.cpp", "src/engine/state_stream.cpp"
PARTS = ("zg_test_engine", "Models/TensorParts.InFp64*")
STAGES = ("zg_test_engine", "*Pipeline*")
HALVES = ("zg_test_model", "*BackwardInHalves*")
CALLS = "src/engine/communication.cpp"
GRID = ("zg_test_engine", "Grid*:Models/GridMatrixOf.*")
TILES = ("zg_test_engine", "Tiles.*")
OVERLAP = ("zg_test_model", "PartsOverlap.*")
GPT2, EXCHANGE = "src/model/gpt2_block.cpp", "src/engine/part_exchange.hpp"
SAVER, VOLUME, KEPT = "src/train/checkpointer.cpp", "io/volume.cpp", "src/train/kept_files.cpp"
PINNED, BESIDE = ("zg_test_train", "Pinned*"), ("zg_test_train", "Beside.*")
EXPORTER, CHECKPOINT_WRITER = "src/train/exporter.cpp", "src/train/checkpoint_writer.cpp"
BEHIND = ("zg_test_train", "Behind.*:PaceTest.*")
HEAD_NORMS, CUDA_HEAD_NORMS = ("zg_test_kernels", "*HeadNorm*"), ("zg_test_cuda", "*HeadNorm*")
DATASET, PACKED = "src/data/dataset.cpp", ("zg_test_data", "PackedData.*")
DROPOUT = ("zg_test_engine", "Dropout*")
RULES = ("zg_test_kernels", "*AttentionRules*:VisibleKeys*")
ROPES = ("zg_test_kernels", "*Rope*:*Embedding*")
CHAT, TEMPLATE = ("zg_test_cli", "Chat.*:ChatTemplate.*"), "src/cli/chat_template.cpp"
LARGE_HEADS = "kernels/cuda/attention_backward_large.cu"
CUDA_ATTENTION = ("zg_test_cuda", "*TensorAttention*:*CudaAttention*")
CUDA_RULES = ("zg_test_cuda", "*AttentionRules*:*AttentionTiles*:*Rope*")
VISIBLE, ARGUMENTS = "include/ziggurat/kernels/visible_keys.hpp", "include/ziggurat/kernels/arguments.hpp"
DECODER, ROPE_TABLES = "src/model/decoder_block.cpp", "src/model/rope_tables.cpp"
MERGES, HF_TOKENS = "src/data/merge_table.cpp", "src/data/hf_tokenizer.cpp"
TOKENS = ("zg_test_data", "HfMerges.*:Nfc.*")
IN_PARTS = ("zg_test_engine", "*InParts*")
FAMILIES = ("zg_test_model", "Model/Families.*:*FamilyFiles*")
ADAPTERS = "src/model/adapters.cpp"
LORA = ("zg_test_model", "Model/LoraFamilies.*")
LORA_RUNS = ("zg_test_train", "LoraRuns.*")
LORA_PARTS = ("zg_test_model", "Models/Parts.*lora")
FROZEN = ("zg_test_engine", "Frozen.*:Lora.*")
IN_TILES = ("zg_test_engine", "AdaptersInTiles.*")
COPIES_ALIKE = ("zg_test_engine", "TensorPartsFormats.*")
GEMV, ONE_ROW = "kernels/host/gemv.cpp", ("zg_test_kernels", "Gemm.Float:Gemm.OneRow*")
MASKS = ("zg_test_model", "ModelDropout.*:Model/FiniteDifferences.*dropout*")


@dataclasses.dataclass(frozen=True)
class Bug:
    name: str
    changes: tuple  # of (file, old text, new text); each old text is there once
    tests: tuple = ENGINE


BUGS = (
    Bug("a reduction in the order of arrival",
        ((COMM, "operands[order_[static_cast<std::size_t>(m)]] = of(published(peer(m).local).in, rank_);",
          "operands[(order_[static_cast<std::size_t>(m)] + turn) % operands.size()] = "
          "of(published(peer(m).local).in, rank_);"),
         (COMM, "      meeting_->open(me_, c);\n      for (int m = 0; m < size(); ++m)\n        operands",
          "      static std::atomic<std::size_t> arrivals{0};\n      const std::size_t turn = arrivals++;\n"
          "      meeting_->open(me_, c);\n      for (int m = 0; m < size(); ++m)\n        operands"))),
    Bug("a mean of the ranks' means",
        ((EXECUTOR, "  result.tokens = static_cast<std::int64_t>(sum_of(exchange(std::array{static_cast<double>(result.tokens)})));\n",
          "  const double own = static_cast<double>(std::max<std::int64_t>(1, result.tokens));\n"
          "  result.tokens = static_cast<std::int64_t>(sum_of(exchange(std::array{static_cast<double>(result.tokens)})));\n"),
         (EXECUTOR, "head_scale_ = scaled ? rule.loss_scale * per_token : 1;",
          "head_scale_ = (scaled ? rule.loss_scale : 1) / own;"),
         (EXECUTOR, "const double unscale = scaled ? 1 / rule.loss_scale : per_token;",
          "const double unscale = (scaled ? 1 / rule.loss_scale : 1) / layout_.options.sharding.ranks;"))),
    Bug("gradients divided by the number of ranks once more",
        ((EXECUTOR, "update_.params.grad_scale = result.skipped ? 0 : unscale * clip;",
          "update_.params.grad_scale = result.skipped ? 0 : unscale * clip / layout_.options.sharding.ranks;"),)),
    Bug("padding in the norm",
        ((WEIGHTS, "  for (const auto& [first, count, counted] : trained_runs(unit, mine)) {",
          "  auto runs = trained_runs(unit, mine);\n  runs.assign(1, {mine.first, mine.count});\n"
          "  for (const auto& [first, count, counted] : runs) {"),)),
    Bug("kept weights are gathered once, and are stale after the update",
        ((SCHEDULE, "!(again || first_group)) return;", "!(again || (first_group && !updates))) return;"),)),
    Bug("a shard's boundary one block late",
        ((ELEMENTS, "return {l.tile(t).first + s.shard() * count, count};",
          "return {l.tile(t).first + s.shard() * count + (s.shard() > 0 ? kQuantBlock : 0), count};"),)),
    Bug("an overflow counts on the rank that has it",
        ((EXECUTOR, "const bool finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);",
          "bool finite = true;\n"
          "  for (const double x : scalars[static_cast<std::size_t>(layout_.options.sharding.rank)])\n"
          "    finite = finite && std::isfinite(x);"),)),
    Bug("random numbers of updates by the index in the shard",
         ((WEIGHTS, "      params.first_element = number;\n", "      params.first_element = from - first + 0 * number;\n"),)),
    Bug("samples by the rank's own numbers",
        ((TRAINER, "place.micro_batch(static_cast<std::int64_t>(m)) * config", "static_cast<std::int64_t>(m) * config"),), TRAIN),
    Bug("evaluation counts padding micro-batches",
        ((EXECUTOR, "ignored(rows, -1)", "ignored(rows, 0)"),)),
    Bug("group of parameters by place in the shard",
        ((WEIGHTS, "const auto p = static_cast<std::size_t>(range.param);",
          "const auto p = static_cast<std::size_t>(&range - tensors.ranges.data());"),)),
    Bug("tokens of one rank",
        ((EXECUTOR, "  result.tokens = static_cast<std::int64_t>(sum_of(exchange(std::array{static_cast<double>(result.tokens)})));\n",
          "  (void)exchange(std::array{0.0});\n"),)),
    Bug("loss of one rank",
        ((EXECUTOR, "    result.loss += scalars[r][0];\n", "    result.loss = scalars[0][0];\n"),)),
    Bug("norm in the order of ranks",
        ((EXECUTOR, "place.sharding.rank_of_piece(piece)", "piece"),)),
    Bug("sums over the own shard group",
        ((WEIGHTS, "groups_.pieces->reduce_scatter(",
          "(groups_.shards ? groups_.shards : groups_.pieces)->reduce_scatter("),)),
    Bug("replicas keep the pieces that they have summed",
        ((WEIGHTS, "if (groups_.replicas == nullptr) return;", "return;"),)),
    Bug("a shard's state is initialised from the parameter's beginning",
        ((STATE, "first = tile.first + at;", "first = at;"),)),
    Bug("initial weights by the index in the shard",
        ((RANK, "random.normal(static_cast<std::uint64_t>(whole + i))", "random.normal(static_cast<std::uint64_t>(at - begin + i))"),),
        TRAIN),
    Bug("evaluation gives every rank the same micro-batches",
        ((EXECUTOR, "first + place.micro_batch(m);", "first + m * place.data_ranks();"),)),
    Bug("a saved shard is put at the beginning of the tile",
        (("src/train/saver.hpp", "std::copy_n(from, run.count, out + run.first)", "std::copy_n(from, run.count, out)"),), TRAIN),
    Bug("every process takes the whole host budget",
        ((PLAN, "ranks_(plan.config.device.ranks * hardware.processes)", "ranks_(plan.config.device.ranks)"),),
        ("zg_test_train", "*Trainer*:*Process*:*Plan*")),
    Bug("all processes use one directory of a drive",
        ((NODE, "return count == 1 || number == 0 ? path :", "return count >= 1 || number == 0 ? path :"),),
        ("zg_test_train", "*Share*")),
    Bug("processes share their cores",
        ((NODE, "n < parts ? begin + 1 : n * (part + 1) / parts;", "n < parts ? begin + 1 : n;"),),
        ("zg_test_train", "*Share*")),
    Bug("GPUs' operands are summed in the order of the group",
        ((NCCL, "operands[order_[static_cast<std::size_t>(m)]] =", "operands[static_cast<std::size_t>(m)] ="),), GPUS),
    Bug("the next call of NCCL comes before the last one has settled",
        ((NCCL, "until([&] { return nccl().settled(comm()); }, c);", "(void)c;"),), GPUS),
    Bug("two members' operands in one row of staging memory",
        ((NCCL, "(member < rank_ ? member : member - 1) * chunk", "(member > 0 ? member - 1 : 0) * chunk"),), GPUS),
    Bug("NCCL's work is not aborted after a failure",
        ((NCCL, "if (!is_letter(call)) group_->abort(static_cast<std::size_t>(rank_));", "(void)call;"),), GPUS),
    Bug("NCCL connects while a stream waits for the host",
        ((NCCL, "    const auto quiet = gpu_.quiet();\n", ""),), GPUS),
    Bug("calls of several processes are not compared",
        ((NCCL, "if (all[m] == mine) continue;", "if (all[m][0] == mine[0]) continue;"),), GPUS),
    Bug("every block of a message to another process is its first",
        ((NCCL, "static_cast<const char*>(c.in) + at, n);", "static_cast<const char*>(c.in), n);"),), GPUS),
    Bug("a failure of another process is not heard while NCCL works",
        ((NCCL, "      world_->listen();\n", ""),), GPUS),
    Bug("parts of attention are added without their weights",
        ((HOST_ATTENTION, "keep[c] = std::exp(before - all);", "keep[c] = 1.0f;"),), CONTEXT),
    Bug("the log-sum-exp of the last part alone",
        ((HOST_ATTENTION, "    lse[c] = all;", "    lse[c] = here;"),), CONTEXT),
    Bug("a ring of parts in one piece",
        ((SEQUENCE_PART, "return {time, part * chunk, (2 * parts - 2 - part) * chunk};",
          "(void)chunk;\n    return {time, part * time, part * time};"),), CONTEXT),
    Bug("rows count from 0 on every rank",
        (("src/model/decoder_block.cpp", "call.shape.positions(), c.heads", "call.shape.time, c.heads"),
         ("src/model/model.cpp", "shape.positions(), rows,", "shape.time, rows,")),
        CONTEXT),
    Bug("gradients of keys and values of other parts are dropped",
        ((ATTENTION, "r.queries(d_att), r.block, r.queries(w.sums), r.keys(sums), w.scratch,",
          "r.queries(d_att), r.block, r.queries(w.sums), r.keys(step == 0 ? sums : next_sums), w.scratch,"),), CONTEXT),
    Bug("gradients of keys and values stay where they are last",
        ((ATTENTION, "ops.cast(s, w.dkv[parts % 2], d_qkv", "ops.cast(s, w.dkv[(parts + 1) % 2], d_qkv"),), CONTEXT),
    Bug("a part before one's own is seen by causality",
        ((ATTENTION, "block.keys = chunk, block.key_positions = stretch(block.key_positions.early);", "block.causal = true;"),), CONTEXT),
    Bug("all queries see a later part",
        ((ATTENTION, "block.queries = chunk, first_query = chunk;", "first_query = 0;"),), CONTEXT),
    Bug("heads of keys in another order than those of queries",
        ((ATTENTION, "visit(rows.row_range(b * time, time).col_range(c.first + i * share, share),",
          "visit(rows.row_range(b * time, time).col_range(c.first + (c.first == 0 ? i : parts - 1 - i) * share, share),"),),
        CONTEXT),
    Bug("targets of whole sequences from the beginning",
        ((TRAINER, "  batch.targets = shape.part.cut(batch.targets, shape.time);\n", ""),),
        ("zg_test_train", "ContextRuns.*")),
    Bug("a bias is added by every part", ((CALL, "part.part == 0 ? bias : View{}", "bias"),), PARTS),
    Bug("positions are added by every part", ((MODEL, "Arch::kGpt2 && part_.part == 0;", "Arch::kGpt2;"),), PARTS),
    Bug("a piece of one's own in place of the sum of pieces",
        ((CALL, "      exchange->reduce_scatter(stream, partial, sum);\n", "      static_cast<void>(partial);\n"),), PARTS),
    Bug("the gradient of a split product's input is not summed",
        ((CALL, "      exchange->all_reduce(stream, sum);\n", "      static_cast<void>(sum);\n"),), PARTS),
    Bug("rows are those of another part",
        ((CALL, "x.row_range(part.part * rows, rows)", "x.row_range((part.parts - 1 - part.part) * rows, rows)"),), PARTS),
    Bug("what several parts have counts several times in the norm",
        ((WEIGHTS, "counted ? w.scalar(1 + op_.unit) : w.discarded()", "w.scalar(1 + op_.unit)"),), PARTS),
    Bug("gradients of norms are not summed with sequence parallelism",
        ((UNITS, "vector(weight, n, all(n), init, part_.sequence);", "vector(weight, n, all(n), init, false);"),),
        PARTS),
    Bug("logits of rows without a token are not masked",
        ((HEAD, "const Workspace w = workspace_of(call, table, call.shape.rows(), workspace, gradients);\n"
          "  const std::int64_t v = call.tokens.count;",
          "const Workspace w = workspace_of(call, table, call.shape.rows(), workspace, gradients);\n"
          "  const std::int64_t v = call.config.vocab_size;"),), PARTS),
    Bug("gradients of shared key and value heads are not summed",
        ((UNITS, "const bool copies = c.kv_heads % part.parts != 0;", "const bool copies = false;"),), PARTS),
    Bug("copies on one part are summed, those of other parts are not",
        ((WEIGHTS, "    all_reduce(whole);\n", ""),), PARTS),
    Bug("a contiguous cut of the fused q, k and v",
        ((PART, "b * lines + part.part * piece, piece", "(part.part * blocks + b) * piece, piece"),), PARTS),
    Bug("sums of exponentials are merged without rescaling",
        (("kernels/host/cross_entropy.cpp", "number(p, 1) * std::exp(number(p, 0) - max)", "number(p, 1)"),), PARTS),
    Bug("tokens of other parts have the gradient of row 0",
        (("kernels/host/embedding.cpp", "const std::int64_t id = args.ids[r] - args.part.first;\n        if (id >= 0 &&",
          "const std::int64_t id = std::max<std::int64_t>(0, args.ids[r] - args.part.first);\n        if (id >= 0 &&"),), PARTS),
    Bug("pipeline: all but the last micro-batch's gradient is dropped",
        ((STAGE, "adds && m == 0, last_forward", "adds, last_forward"),), STAGES),
    Bug("pipeline: the head's part of a tied gradient is not added",
        ((OPERANDS, "return slot.first && !(slot.kind == OpKind::kEmbeddingBackward && tied());",
          "return slot.first && !(slot.kind == OpKind::kEmbeddingBackward && tied() && !layout_.options.is_pipeline());"),),
        STAGES),
    Bug("pipeline: the head's part of a tied gradient is added when it comes",
        ((STAGE, "has_table_gradient_ ? embedding_backward(m) : waiting_.push_back(m);", "embedding_backward(m);"),), STAGES),
    Bug("pipeline: a mean of the micro-batches' means",
        ((EXECUTOR, "const double per_token = 1.0 / static_cast<double>(std::max<std::int64_t>(1, result.tokens));",
          "const double per_token =\n"
          "      1.0 / static_cast<double>(place.parts.stages > 1 ? layout_.options.micro_batches *\n"
          "                                                             layout_.options.micro_batch.rows() *\n"
          "                                                             place.data_ranks()\n"
          "                                                       : std::max<std::int64_t>(1, result.tokens));"),), STAGES),
    Bug("pipeline: activations go to the tensor of the next micro-batch",
        ((OPERANDS, "return {Operand::kInput, overwrite(activation(slot.unit - 1, slot.micro_batch))};",
          "return {Operand::kInput, overwrite(activation(slot.unit - 1, slot.micro_batch + 1))};"),), STAGES),
    Bug("pipeline: a chunk has a tensor fewer than it needs",
        ((PIPELINE, "  return most;\n}\n\nstd::vector<std::int32_t> split_layers",
          "  return std::max(1, most - 1);\n}\n\nstd::vector<std::int32_t> split_layers"),), STAGES),
    Bug("pipeline: the loss of every stage is added",
        ((EXECUTOR, "    result.loss += scalars[r][0];", "    result.loss += scalars.back()[0];"),), STAGES),
    Bug("pipeline: the last stage keeps the table of the first step",
        ((ISSUE, "  const CommCall call = calls_of(layout_, op).front();\n  if (op.kind == OpKind::kSend) {",
          "  const CommCall call = calls_of(layout_, op).front();\n  static thread_local int tables = 0;\n"
          "  if ((op.has(Operand::kWeight) || op.has(Operand::kTable)) && ++tables > 1) return;\n"
          "  if (op.kind == OpKind::kSend) {"),), STAGES),
    Bug("pipeline: a gradient is finished before its last micro-batch",
        ((STAGE, "if (m + 1 == shape_.step.micro_batches) push(OpKind::kFinishGradient, unit, 0);",
          "if (m == 0) push(OpKind::kFinishGradient, unit, 0);"),), STAGES),
    Bug("pipeline: what a step needs is passed on after it",
        ((PIPELINE, "return std::pair(e.begin, e.kind == PipelineEvent::Kind::kStep);",
          "return std::pair(e.begin, e.kind != PipelineEvent::Kind::kStep);"),), STAGES),
    Bug("pipeline: every stage tells the tokens",
        ((EXECUTOR, "if (!place.tells_tokens()) break;", "if (!place.tells_loss()) break;"),), STAGES),
    Bug("zero-bubble: the second half is forgotten for the last micro-batch",
        ((STAGE, "          push(OpKind::kBackwardWeight, u, m);\n",
          "          if (m + 1 < shape_.step.micro_batches) push(OpKind::kBackwardWeight, u, m);\n"),), STAGES),
    Bug("zero-bubble: the next micro-batch overwrites the gradients between the halves",
        ((LAYOUT, "recompute ? kept : activations,", "recompute ? std::min<std::int64_t>(kept, 1) : activations,"),), STAGES),
    Bug("zero-bubble: the gradients of a step are added to those of the step before",
        ((STAGE, "kind == OpKind::kBackward || kind == OpKind::kBackwardWeight ||", "kind == OpKind::kBackward ||"),), STAGES),
    Bug("zero-bubble: a norm overwrites the gradient that the second half multiplies with",
        (("src/model/decoder_block.cpp", "    if (holds()) ops.cast(s, w.held, f.x1), ops.cast(s, dx, w.held);\n",
          "    if (holds()) ops.cast(s, dx, f.x1), ops.cast(s, dx, w.held);\n"),), HALVES),
    Bug("zero-bubble: the gradient of a bias is added in both halves",
        (("src/model/gpt2_block.cpp",
          "  weights(AdapterInput::kGateUp, f.fc, input.end(), kFcWeight, kFcBias);\n",
          "  weights(AdapterInput::kGateUp, f.fc, input.end(), kFcWeight, kFcBias);\n"
          "  call.ops.bias_backward(call.stream, f.fc, call.grad(kFcBias), w.bias_partials(f.fc.cols));\n"),), HALVES),
    Bug("grid: what several parts have counts several times in the norm of stages",
        ((LAYOUT, "if (band.counted) continue;", "if (band.counted || options_.is_pipeline()) continue;"),), GRID),
    Bug("grid: the norm of stages is that of the first part of each layer, several times",
        ((EXECUTOR, "place.rank_at(part, place.sharding.rank_of_piece(piece), stage);",
          "place.rank_at(place.parts.stages > 1 ? 0 : part, place.sharding.rank_of_piece(piece), stage);"),), GRID),
    Bug("grid: of a tied table a part of a layer passes on its share of its own share",
        ((CALLS, "call.count = layout.tile(op.tile).count;\n    other",
          "call.count = layout.tile(op.tile).count / layout.options.parts.tensor;\n    other"),), GRID),
    Bug("grid: stages pass on a context rank's share of its own rows",
        ((CALLS, "residual_rows(layout.options.micro_batch) * layout.model->config().width;",
          "residual_rows(layout.options.micro_batch) * layout.model->config().width /\n"
          "         layout.options.parts.context;"),), GRID),
    Bug("grid: parts of layers have their rows at the beginning of sequences",
        ((MODEL, "shape.positions(), rows,", "part_.parts > 1 ? RowPositions(shape.time) : shape.positions(), rows,"),), GRID),
    Bug("the input's gradient is that of the last tile",
        ((CALL, "      ops.gemm(stream, dy.col_range(first, rows.rows), rows, sum, options);\n"
          "      options.accumulate = true;\n",
          "      ops.gemm(stream, dy.col_range(first, rows.rows), rows, sum, options);\n"),), TILES),
    Bug("every tile has the first one's biases",
        ((CALL, "if (*columns) *columns = columns->col_range(first, rows.rows);",
          "if (*columns) *columns = columns->col_range(columns->rows == 1 ? 0 : first, rows.rows);"),), TILES),
    Bug("the gap behind a matrix's last tile is left as it was",
        ((CALL, "if (gradient && into == Gradients::kOverwrite && behind > 0)",
          "if (gradient && into == Gradients::kOverwrite && behind < 0)"),), TILES),
    Bug("every micro-batch overwrites a tile's gradient",
        ((PROGRAM, "add_to(accumulator(t), is_first_sum(slot))});", "add_to(accumulator(t), true)});"),), TILES),
    Bug("a tile's gradient is finished by every micro-batch",
        ((PROGRAM, "if (!reads && last_backward_[static_cast<std::size_t>(unit)] == &slot)", "if (!reads)"),), TILES),
    Bug("tiles are gathered once, and dropped",
        ((PROGRAM, "if (reads && gathers_by_use(unit)) gather(t,",
          "if (reads && gathers_by_use(unit) && last_use) gather(t,"),), TILES),
    Bug("the squares of a tile's gradient are those of the unit's first elements",
        ((WEIGHTS, "device_.ops().finish_gradient(stream, sum.col_range(first - unit.first, count),",
          "device_.ops().finish_gradient(stream, sum.col_range(0, count),"),), TILES),
    Bug("gradients of tiles are finished in the memory of the layer's workspace",
        (("src/engine/workspace.hpp", "partials_bytes(layout_) > 0 ? base_ + partials_offset(layout_) : scratch();",
          "base_ + (layout_.options.place().ranks() > 1 ? partials_offset(layout_) : 4096);"),), TILES),
    Bug("the last tile of a matrix is short by a row",
        ((CALL, "f(i, first, std::clamp<std::int64_t>(all - first, 0, tile.count / p.cols));",
          "f(i, first, std::clamp<std::int64_t>(all - first - 1, 0, tile.count / p.cols));"),), TILES),
    Bug("every tile has the gradient of the first one's rows",
        ((CALL, "if (rows > 0) f(at, first);", "if (rows > 0) f(at, kind == TileUse::Kind::kGradient ? 0 : first);"),), TILES),
    Bug("heads that several parts have are cut into tiles",
        ((UNITS, "unit.params[i].vector || unit.params[i].summed;", "unit.params[i].vector;"),), TILES),
    Bug("what several parts have is summed with every tile",
        ((ELEMENTS, "if (!p.summed || p.offset < begin || p.offset >= behind) continue;", "if (!p.summed || (p.offset < begin && p.offset >= behind)) continue;"),), TILES),
    Bug("second halves finish no gradient of a tile",
        ((PROGRAM, "if (slot.kind == OpKind::kBackward || slot.kind == OpKind::kBackwardWeight ||\n",
          "if (slot.kind == OpKind::kBackward ||\n"),), TILES),
    Bug("sums of tiles lie where a half of a backward keeps a gradient",
        ((MODEL, "call.sums = tile_sums(shape, Backward::kInHalves, workspace);",
          "call.sums = tile_sums(shape, Backward::kWhole, workspace);"),), TILES),
    Bug("the second half reads tiles of weights",
        (("src/model/tiles.cpp", "  if (input) add(products[i], kWeight);",
          "  if (input || weight) add(products[i], kWeight);"),), TILES),
    Bug("tables in tiles: each tile of the embedding zeroes other tokens' rows",
        (("kernels/host/embedding.cpp", "if (args.part.only && !is_here) continue;", ""),), TILES),
    Bug("tables in tiles: the loss is added with every tile",
        ((HEAD, "first ? loss_sum : w_.discarded", "loss_sum"),), TILES),
    Bug("tables in tiles: the gradient of the rows is that of the last tile",
        ((HEAD, "options.accumulate = !first;", ""),), TILES),
    Bug("tables in tiles: every tile has the numbers of the first one",
        ((HEAD, "tell(logits, tiles_[i], numbers_of(i));", "tell(logits, tiles_[i], numbers_of(0));"),), TILES),
    Bug("tables in tiles: a tile without tokens adds to the softmax",
        ((HEAD, "call_.ops.zero(call_.stream, numbers_of(j).row_range(1, 2));", ""),), TILES),
    Bug("tables in tiles: parts tell each other the numbers of the first part's tiles",
        ((HEAD, "all.row_range(3 * call_.part.part * count(), 3 * count())", "all.row_range(0, 3 * count())"),), TILES),
    Bug("the embedding's backward overwrites the head's part of a tied gradient",
        ((OPERANDS, "return slot.first && !(slot.kind == OpKind::kEmbeddingBackward && tied());",
          "return slot.first;"),), ("zg_test_engine", "*Golden*")),
    Bug("tables in tiles: the head finishes no gradient of a tile",
        ((PROGRAM, "          slot.kind == OpKind::kHead || slot.kind == OpKind::kEmbeddingBackward)\n",
          "          slot.kind == OpKind::kEmbeddingBackward)\n"),), TILES),
    Bug("tables in tiles: the shard of a tied tile is dropped behind the embedding's gather",
        ((OPERANDS, "return slot.last && (slot.kind != OpKind::kEmbedding || !tied() || layout_.options.is_pipeline());",
          "return slot.last;"),), TILES),
    Bug("tables in tiles: a tile is dead behind its first use",
        ((PROGRAM, "const bool dead = gathers_by_use(unit) || (last_use && tile_is_dead(slot, t));",
          "const bool dead = gathers_by_use(unit) || tile_is_dead(slot, t);"),), TILES),
    Bug("tables in tiles: stages pass on the first tile alone",
        ((PROGRAM, "return for_tiles(0, [&](std::int32_t t) { send_table(slot, t); });",
          "return send_table(slot, layout_.first_tile(0));"),), TILES),
    Bug("tables in tiles: parts cut the rows that they have, and not those that they have room for",
        ((UNITS, "const std::int64_t all = table ? table->rows : p.rows,", "const std::int64_t all = p.rows,"),), TILES),
    Bug("tables in tiles: the positions' gradient is added with every tile",
        ((MODEL, "const bool positions = config_.arch == Arch::kGpt2 && first == 0;",
          "const bool positions = config_.arch == Arch::kGpt2;"),), TILES),
    Bug("a stage that needs no tiles has whole layers beside those that do",
        (("src/train/rank_plans.cpp", "    mine.blocks = std::max(mine.blocks, plan.choices.blocks);\n", ""),),
        ("zg_test_train", "PlansOfRanks.*")),
    Bug("the sum of an input's gradient is waited for where it begins",
        ((DECODER, "    const Begun sum = call.begin_sum_of_parts(w.d_norm);\n",
          "    const Begun sum(call.sum_of_parts(w.d_norm), nullptr, s);\n"),), OVERLAP),
    Bug("gradients of weights take rows that are under way",
        ((DECODER, "if (whole_) stack.backward_weight(dy, input.end());",
          "if (whole_) stack.backward_weight(dy, call.part.sequence ? w.all_rows : input.end());\n"
          "    if (whole_ && call.part.sequence) (void)input.end();"),), OVERLAP),
    Bug("the second half gathers two inputs into one room",
        ((GPT2, "call.begin_all_rows(rows, w.d_narrow)",
          "call.begin_all_rows(rows, which == AdapterInput::kQkv ? w.all_rows : w.d_narrow)"),),
        OVERLAP),
    Bug("exchanges end in another order than they begin",
        ((GPT2, "  Begun dy = gradient_of(Dropped::kMlp, AdapterInput::kDown, f.x1);\n"
          "  Begun input = input_of(AdapterInput::kGateUp, f.ln2);\n",
          "  Begun input = input_of(AdapterInput::kGateUp, f.ln2);\n"
          "  Begun dy = gradient_of(Dropped::kMlp, AdapterInput::kDown, f.x1);\n"),), OVERLAP),
    Bug("a refused run of several ranks is told the host's budget of one",
        ((PLAN, "host = ranks_ * least->host;", "host = least->host;"),), ("zg_test_train", "TileRuns.AllStages*")),
    Bug("what is launched as a whole drops what it dropped in the step before",
        ((ISSUE, "  if (dropout_of(op)) return issue(op);\n", ""),), ("zg_test_cuda_engine", "DropoutPlacements.*Whole")),
    Bug("an exchange begins before what it exchanges is there",
        ((EXCHANGE, "    stream_->wait(s.record());\n", "    (void)s;\n"),), PARTS),
    Bug("computation goes on with what is still exchanged",
        ((EXCHANGE, "    timer_.wait(s, begun_.front());\n", "    (void)s;\n"),), PARTS),
    Bug("a norm with 1 + w has w in its backward",
        (("kernels/host/norms.cpp", "const auto g = hn::Mul(e, load_weight<kNorm>(d, args.w + i, w));",
          "const auto g = hn::Mul(e, load(d, args.w + i, w));"),), HEAD_NORMS),
    Bug("a norm with 1 + w has w in its backward on a GPU",
        (("kernels/cuda/norms_backward.hpp", "A inner = d[j] * weight_at<kNorm>(w, j);", "A inner = d[j] * w[j];"),), CUDA_HEAD_NORMS),
    Bug("the gradient of the heads' weight is the last head's",
        (("kernels/host/norms.cpp", "const std::int64_t c = h * args.head_size;\n        norm_backward_row",
          "const std::int64_t c = h * args.head_size;\n        clear(sums, args.head_size);\n        norm_backward_row"),), HEAD_NORMS),
    Bug("a gate's derivative is on the other half",
        (("kernels/host/activations.cpp", "save(d, hn::Mul(hn::Mul(e, u), activated.slope), dgate + i, w);\n    "
          "save(d, hn::Mul(e, activated.value), dup + i, w);",
          "save(d, hn::Mul(hn::Mul(e, u), activated.value), dgate + i, w);\n    "
          "save(d, hn::Mul(e, activated.slope), dup + i, w);"),), ("zg_test_kernels", "*Activation*")),
    Bug("the derivative of the logits' cap is left out",
        (("kernels/host/cross_entropy.cpp", "save(d, cap.times_slope(d, gradient, logit), dlogits + i, w);",
          "save(d, gradient, dlogits + i, w);"),), ("zg_test_kernels", "*CrossEntropy*")),
    Bug("the derivative of the logits' cap is left out on a GPU",
        (("kernels/cuda/cross_entropy.cu", "y[j] *= A{1} - t * t;", "y[j] *= A{1} - A{0} * t;"),), ("zg_test_cuda", "*CrossEntropy*")),
    Bug("packing: the last token of a document is to foretell the next document",
        ((DATASET, "if (piece.goes_on) split.file->read(", "split.file->read("),), PACKED),
    Bug("packing: documents see what is before them in their sequence",
        ((DATASET, "std::fill_n(first_keys + at, n, static_cast<std::int32_t>(at));", "std::fill_n(first_keys + at, n, 0);"),), PACKED),
    Bug("packing: all micro-batches have the first one's documents",
        (("src/engine/workspace.hpp", "return tokens(micro_batch, 2 *", "return tokens(0 * micro_batch, 2 *"),), IN_PARTS),
    Bug("blends: a source is drawn by the place in the micro-batch",
        ((DATASET, "blend.below(number, 1ull << 53)", "blend.below(static_cast<std::uint64_t>(i), 1ull << 53)"),),
        ("zg_test_data", "SeveralFiles.*")),
    Bug("blends: all sources are drawn alike",
        ((DATASET, "end += pool.end / sum", "end += 1.0 / static_cast<double>(pools.size())"),), ("zg_test_data", "SeveralFiles.*")),
    Bug("dropout: sequences by the rank's own numbers",
        ((ISSUE, "layout_.options.place().micro_batch(op.micro_batch);", "op.micro_batch;"),), DROPOUT),
    Bug("dropout: a forward that is run again has the masks of the next step",
        ((ISSUE, "const std::optional<DropoutPlace> dropout_;", "std::optional<DropoutPlace> dropout_;"),
         (ISSUE, "  if (again) forward(View(), saved);\n",
          "  if (again && dropout_) ++dropout_->step;\n  if (again) forward(View(), saved);\n"
          "  if (again && dropout_) --dropout_->step;\n")), DROPOUT),
    Bug("dropout: evaluations drop, too", ((EXECUTOR, "  dropout_step_.reset();\n", ""),), DROPOUT),
    Bug("dropout: all layers have the masks of the first",
        ((ISSUE, "dropout_keys_[static_cast<std::size_t>(op.unit)]", "dropout_keys_[op.unit > 0 ? 1 : 0]"),), DROPOUT),
    Bug("dropout: a resumed run counts its steps from 0",
        ((TRAINER, "engine().train_step(step, micro_batches", "engine().train_step(step - first_step(), micro_batches"),),
        ("zg_test_train", "Runs/Resumed.*/Dropout")),
    Bug("dropout: what is kept is not scaled",
        (("include/ziggurat/kernels/dropout.hpp", "static_cast<A>(1 / (1 - dropout.rate))", "static_cast<A>(dropout.rate < 1)"),), MASKS),
    Bug("dropout: the gradient of a branch passes what was dropped",
        ((CALL, "    drop(what, dy, kept);\n", "    ops.cast(stream, dy, kept);\n"),), MASKS),
    Bug("dropout: the gradient of the residual stream is dropped with its branch's",
        ((CALL, "    drop(what, dy, kept);\n", "    drop(what, dy, kept);\n    drop(what, dy, dy);\n"),), MASKS),
    Bug("dropout: every part drops as the first rows are",
        ((CALL, ".first_row = part.sequence ? part.part * x.rows : 0,", ".first_row = 0,"),), MASKS),
    Bug("dropout: parts that split the rows drop before they are summed",
        ((CALL, "    const View sum = sum_of_parts(room);\n    if (drops(what)) drop(what, sum, sum);\n",
          "    if (drops(what)) drop(what, mine(room), mine(room));\n    const View sum = sum_of_parts(room);\n"),), DROPOUT),
    Bug("dropout: positions are counted from the beginning of a part",
        ((CALL, "const RowPositions positions = shape.positions();", "const RowPositions positions(shape.time);"),), MASKS),
    Bug("LoRA: the adapter is scaled twice",
        ((ADAPTERS, "call_.ops.scale(call_.stream, low, call_.config.lora.factor(), low);",
          "for (int twice = 0; twice < 2; ++twice) call_.ops.scale(call_.stream, low, call_.config.lora.factor(), low);"),),
        LORA),
    Bug("LoRA: the gradient of A is not scaled",
        ((ADAPTERS, "    call_.ops.scale(call_.stream, d, call_.config.lora.factor(), d);\n", ""),), LORA),
    Bug("LoRA: rslora divides by the rank",
        (("include/ziggurat/model/lora.hpp", "return alpha / (rslora ? std::sqrt(r) : r);", "return alpha / r;"),), LORA),
    Bug("LoRA: the gradient of the input lacks what passes the adapter",
        ((ADAPTERS, "if (!drops()) return call_.linear_dx_more(d, weight(i, 0), dx);", "if (!drops()) return;"),), LORA),
    Bug("LoRA: the keys' adapter adds to the queries",
        ((ADAPTERS, "add(LoraModule::kK, kQkv, \"self_attn.k_proj\", c.width, kv, q);",
          "add(LoraModule::kK, kQkv, \"self_attn.k_proj\", c.width, kv);"),), LORA),
    Bug("LoRA: the gradient of A is that of an input of which nothing is dropped",
        ((ADAPTERS, "call_.linear_dw(d_low(i, place), input_of(one, x), grad(i, 0));",
          "call_.linear_dw(d_low(i, place), x, grad(i, 0));"),), LORA),
    Bug("LoRA: a forward that is run again leaves out the last adapter",
        ((DECODER, "    if (!y) return adapters.forward(b.adapters, b.input, y);\n", "    if (!y) return;\n"),), LORA),
    Bug("LoRA: fused matrices are merged with the rows of the first of them",
        (("src/model/adapter_files.cpp", "param.file_row + first;", "first;"),), LORA),
    Bug("LoRA: B begins at random",
        (("src/train/rank.cpp", "  if (p.init == Init::kZero) return;\n", ""),), LORA_RUNS),
    Bug("LoRA: A depends on the shards",
        (("src/train/rank.cpp", "p.whole_element(i)", "i - begin"),), LORA_RUNS),
    Bug("LoRA: the frozen model is written",
        ((OPERANDS, "add(Operand::kWeight, read(own.weight(t), ends && own.tile_is_dead(slot, t)));",
          "add(Operand::kWeight, slot.kind == OpKind::kBackward ? write(own.weight(t)) : read(own.weight(t)));"),), FROZEN),
    Bug("LoRA: GPT-2's activation takes the product without what its adapter adds",
        ((GPT2, "    adapters.forward(AdapterInput::kGateUp, rows, f.fc);\n    ops.gelu(s, f.fc, f.act);\n",
          "    ops.gelu(s, f.fc, f.act);\n    adapters.forward(AdapterInput::kGateUp, rows, f.fc);\n"),),
        ("zg_test_model", "Model/LoraFamilies.*/gpt2")),
    Bug("LoRA: the parts' gradients of A are not summed",
        ((UNITS, "matrix(a, rank, one.in, all(rank), Init::kUniform, 0, summed);",
          "matrix(a, rank, one.in, all(rank), Init::kUniform);"),), LORA_PARTS),
    Bug("LoRA: the parts' gradients of B are not summed",
        ((UNITS, "matrix(b, one.out, rank, all(one.out), Init::kZero, 0, summed);",
          "matrix(b, one.out, rank, all(one.out), Init::kZero);"),), LORA_PARTS),
    Bug("LoRA: every part adds what the adapters of all parts give",
        ((DECODER, "    adapters.forward(b.adapters, b.input, w.d_norm);\n    const View sum = call.sum_of_parts(w.d_norm);\n",
          "    const View sum = call.sum_of_parts(w.d_norm);\n    if (!call.part.sequence) adapters.forward(b.adapters, b.input, w.d_norm);\n"),),
        LORA_PARTS),
    Bug("LoRA: a part's mask begins at its own first column",
        ((ADAPTERS, ".first_column = is_split_by_inputs(adapter.input) ? call_.part.part * x.cols : 0},",
          ".first_column = 0},"),), LORA_PARTS),
    Bug("LoRA: a part has the rows of B of the part before it",
        ((UNITS, "      return piece_of_lines(part, q);\n",
          "      return piece_of_lines({part.parts, (part.part + part.parts - 1) % part.parts, part.sequence}, q);\n"),),
        LORA_PARTS),
    Bug("LoRA: the second half leaves out the adapters of the last products",
        ((DECODER, "    b.adapters.backward_weight(branch.adapters, dy, branch.input);\n", ""),), HALVES),
    Bug("LoRA: the second half takes the gradients of the adapters that share an input for each other's",
        ((ADAPTERS, "return saved_.d_low[adapter] ? saved_.d_low[adapter] : workspace_.d_low[place];",
          "return saved_.d_low[adapter] ? saved_.d_low[place] : workspace_.d_low[place];"),), HALVES),
    Bug("frozen units: a stage passes a gradient on to stages of which nothing is trained",
        ((STAGE, "        if (last_block(part - 1) < shape_.step.lowest) return;  // nothing there is trained\n", ""),), FROZEN),
    Bug("frozen units: a stage keeps the gradient of a table that is not trained",
        ((LAYOUT, "      if (!layout_.is_frozen(u)) t.accumulator = add_accumulator(tile.count);\n",
          "      t.accumulator = add_accumulator(tile.count);\n"),), FROZEN),
    Bug("frozen units: backward goes on below all that is trained",
        (("src/engine/layout.cpp", "++layout_.first_trained_;", "layout_.first_trained_ += 0;"),), FROZEN),
    Bug("frozen units: their weights are dropped too early where they are kept between the passes",
        (("src/engine/schedule.cpp", "(kind == OpKind::kForward && !below)", "(kind == OpKind::kForward && unit > shape.head())"),),
        FROZEN),
    Bug("a drive is not flushed for a checkpoint",
        ((SAVER, "for (std::size_t d = 1; d < errors.size(); ++d) {", "for (std::size_t d = 2; d < errors.size(); ++d) {"),),
        PINNED),
    Bug("no drive is flushed for a checkpoint before its commit",
        ((SAVER, "all_are(!o_.flushes || sync_drives());", "all_are(true);"),
         (SAVER, "  settle_pins(good_);\n", "  if (o_.flushes) sync_drives();\n  settle_pins(good_);\n")), PINNED),
    Bug("an update does not wait for the checkpoint that is committed",
        ((EXECUTOR, "std::exchange(before_update_, nullptr)();", "before_update_ = nullptr;"),), BESIDE),
    Bug("a run that fails leaves the checkpoint that it had begun",
        ((SAVER, "    if (!pending_) return leave(why);\n", "    return leave(why);\n"),), BESIDE),
    Bug("the others hear of a failure when the commit under way has ended",
        ((TRAINER, "        if (!comm_.empty()) comm_[static_cast<std::size_t>(r)]->fail(error);\n"
          "        checkpoints_->end(r, error, first && rank_told_of(error) < 0);\n",
          "        checkpoints_->end(r, error, first && rank_told_of(error) < 0);\n"
          "        if (!comm_.empty()) comm_[static_cast<std::size_t>(r)]->fail(error);\n"),), BESIDE),
    Bug("a failure of the training ends the commit under way",
        (("src/train/run_checkpoints.cpp", "  CommRank* const world = world_.empty() ? comm : world_[local].get();",
          "  CommRank* const world = comm;"),), BESIDE),
    Bug("what a rank has heard counts as the cause of the end",
        (("src/train/failures.hpp", "    of_[static_cast<std::size_t>(rank)] = std::current_exception();\n    if (first_ >= 0) return false;\n",
          "    of_[static_cast<std::size_t>(rank)] = std::current_exception();\n"),
         ("src/train/failures.hpp", "      if (here && ", "      if (here && rank < 0 && ")), BESIDE),
    Bug("a commit thread that throws tells nobody",
        ((SAVER, "    failure_ = std::current_exception();\n    leave(Error(Errc::kIo, \"\", error.what()));\n",
          "    failure_ = std::current_exception();\n"),), BESIDE),
    Bug("between processes a failure of the training ends the commit under way",
        (("src/comm/mpi_wire.cpp", "failures_(apart ? ", "failures_(apart && false ? "),),
        ("zg_test_cli", "ProcessesTest.AFailureOfOne*")),
    Bug("a process waits for ever for those that never start",
        (("src/comm/mpi_wire.cpp", "if (!has_joined && ", "if (has_joined && "),),
        ("zg_test_cli", "ProcessesTest.AProcessThatNeverStarts*")),
    Bug("the name of a process's directory is not synced",
        ((SAVER, "rfind(kProcessDirectory, 0) == 0) sync(directory.parent_path());", "rfind(kProcessDirectory, 0) == 0) sync(directory);"),),
        BESIDE),
    Bug("the first process alone says whether the drives are flushed",
        ((SAVER, "good = all_are(!o_.flushes || sync_drives());", "good = all_are(!o_.flushes || sync_drives() || o_.plan->rank > 0);"),),
        ("zg_test_cli", "ProcessesTest.AFlushThatFails*")),
    Bug("directories of checkpoints are shared with other runs",
        (("src/train/directory_lock.cpp", "LOCK_EX | LOCK_NB", "LOCK_SH | LOCK_NB"),), ("zg_test_train", "Behind.TwoRuns*")),
    Bug("rows of reads go on at another tier",
        (("src/store/program.cpp", "read_at(i) && read_at(i) == read_at(i + 1);", "read_at(i) && read_at(i + 1);"),),
        ("zg_test_store", "KnownFuture.*")),
    Bug("rows of reads go on behind the last read",
        (("src/store/program.cpp", "a.access == Access::kRead && !a.last ?", "a.access == Access::kRead ?"),),
        ("zg_test_store", "KnownFuture.*")),
    Bug("budgets are not sought below the first that fits above the cheap test's",
        (("src/store/dry_run.cpp", "return between(low, next, fits, most);", "return next;"),),
        ("zg_test_store", "SmallestBudgets.*")),
    Bug("a thread that waits for a commit does not hasten it",
        (("src/store/mover_links.cpp", "    n->hastened = true;\n", "    if (n->hastened || !n->hastened) continue;\n"),),
        ("zg_test_store", "StoreVersions.*")),
    Bug("what waits for a link is not hastened",
        (("src/store/mover_links.cpp", "    n->hastened = true;\n", ""),), ("zg_test_store", "StoreVersions.*")),
    Bug("first writes are counted when they are under way",
        (("src/store/nvme_copies.cpp", "  transfer.version = ++c.writes;\n", "  transfer.version = ++c.writes;\n  written(segment, transfer.slot);\n"),),
        ("zg_test_store", "StoreVersions.*")),
    Bug("a rank saves its shard of a layer's first tiles alone",
        (("src/train/checkpoint_writer.cpp", "    if (first < end) held.push_back({first, end - first});\n",
          "    if (first < end && held.empty()) held.push_back({first, end - first});\n"),), ("zg_test_train", "TileRuns.Shards*")),
    Bug("codes in several pieces have scales of the whole tensor",
        (("src/train/checkpoint_writer.cpp", "codes && (!param.is_whole() || in_pieces);", "codes && !param.is_whole() && in_pieces;"),),
        ("zg_test_train", "TileRuns.Shards*")),
    Bug("a log whose step is no number ends the run that goes on",
        (("src/train/step_log.cpp", "!number->is_number_integer() || *number != records + 1",
          "number->get<std::int64_t>() != records + 1"),), ("zg_test_train", "CheckpointInputs.Logs*")),
    Bug("a piece of pins may end behind its segment",
        (("src/train/pinned_state.cpp", "offset + bytes <= segments[static_cast<std::size_t>(segment)].bytes;", "offset <= kMost - bytes;"),),
        ("zg_test_train", "PinnedInputs.*")),
    Bug("a kept file that a checkpoint names is removed where its note is another one's",
        ((KEPT, "    if (std::any_of(needed.begin(), needed.end(), [&](const auto& one) { return one.name == file.name; }))\n"
          "      return \"\";\n", ""),), ("zg_test_train", "PinnedInputs.*")),
    Bug("what a checkpoint pins on a drive counts as free for a run that does not take it over",
        (("src/train/trainer_checkpoints.cpp", "hardware = hardware_of(config, gpus_, processes_, false);",
          "hardware = hardware_of(config, gpus_, processes_, true);"),), BESIDE),
    Bug("the first process alone flushes and keeps its drives' files",
        (("src/train/run_checkpoints.cpp", ".flushes = local == 0 && pins_here_,",
          ".flushes = local == 0 && processes_.number() == 0,"),),
        ("zg_test_cli", "ProcessesTest.StateThatProcessesPinGoesOn")),
    Bug("each process decides for itself whether it takes its drives' files over",
        (("src/train/adoption.cpp", "    if (theirs[0] > 0 || !found) continue;\n", "    if (theirs[0] >= 0) continue;\n"),),
        ("zg_test_cli", "ProcessesTest.StateThatProcessesPinGoesOn")),
    Bug("an import takes tensors of any shape",
        (("src/train/checkpoint_import.cpp", "entry->shape != shape) {", "entry->count() != tensor.count) {"),),
        ("zg_test_train", "*Import*")),
    Bug("pins of the checkpoint before go when a commit fails",
        ((SAVER, "    if (pins_.count(o_.number) > 0) (void)unpin(pins_.find(o_.number));\n", "    while (!pins_.empty()) unpin(pins_.begin());\n"),), PINNED),
    Bug("a pinned slot is written to",
        ((VOLUME, "    if (slots[i].pins > 0) continue;\n", ""),
         ("io/volume_transfers.cpp", "ZG_ASSERT(slot.pins == 0, ", "ZG_ASSERT(slot.pins >= 0, ")), PINNED),
    Bug("a checkpoint names the slot before the newest",
        (("src/store/nvme_copies.cpp", "  const int slot = volume_.newest_slot(extent(segment));\n  ZG_ASSERT(",
          "  int slot = volume_.newest_slot(extent(segment));\n"
          "  if (volume_.version(extent(segment), (slot + 1) % slots(segment)) > 0) slot = (slot + 1) % slots(segment);\n"
          "  ZG_ASSERT("),),
        PINNED),
    Bug("what is dirty in memory is not written for a checkpoint",
        (("src/store/store.cpp", "expect(id, !there);\n    p.mover.carry_out(p.actions, Urgency::kWriteBack);",
          "expect(id, !there && false);\n    p.actions.clear();"),), PINNED),
    Bug("a checkpoint pins the version before the one that is being written",
        (("src/store/store.cpp", "p.mover.nvme()->expect(id, !there);", "p.mover.nvme()->expect(id, !there && false);"),), PINNED),
    Bug("the name of a kept file is not synced",
        ((SAVER, "  sync(directory);\n", ""),),
        PINNED),
    Bug("a kept file is removed for a directory that does not know it",
        ((KEPT, "return !purpose.empty() && fs::is_regular_file(marker_of(file, purpose), error);",
          "return !file.name.empty() && fs::is_directory(purpose, error);"),), PINNED),
    Bug("a failed flush is forgotten by the next one",
        ((SAVER, "    if (errors[d] != 0 && lost_.empty())", "    if (d == 0) lost_.clear();\n    if (errors[d] != 0 && lost_.empty())"),),
        PINNED),
    Bug("a resumed run does not know what older checkpoints pin",
        (("src/train/run_checkpoints.cpp", "adoption_ ? adoption_->pins[local] : Pins()", "Pins()"),
         ("src/train/adoption.cpp", "    ++slot->pins;\n", "")), PINNED),
    Bug("attention: a window has one key more",
        ((VISIBLE, "query - window + 1;", "query - window;"),), RULES),
    Bug("attention: the slope of the cap is left out of the backward",
        (("kernels/host/attention_softmax.hpp", "if constexpr (kCapped) g = hn::Mul(g, slope);", ""),), RULES),
    Bug("attention: scores are capped behind the mask",
        (("kernels/cuda/attention_forward.cu", "    if (scale.cap != 0) cap_scores(s, scale.cap);\n", ""),
         ("kernels/cuda/attention_forward.cu", "  update_softmax(s, r, scale.exponent);",
          "  if (kRuled && scale.cap != 0) cap_scores(s, scale.cap);\n  update_softmax(s, r, scale.exponent);")), CUDA_RULES),
    Bug("attention: a document's first key is left out of the backward",
        (("kernels/cuda/attention_backward_keys.cu", "if (row + m * 16 + row_of(i) < of_queries[i % 2])",
          "if (row + m * 16 + row_of(i) <= of_queries[i % 2])"),), CUDA_RULES),
    Bug("attention: a tile that is partly hidden is left out",
        ((HOST_ATTENTION, "if (task.visible.first(query) >= key + kTile) continue;",
          "if (task.visible.first(query) > key) continue;"),), RULES),
    Bug("attention: hidden tiles are computed in the backward",
        ((HOST_ATTENTION, "for (std::int64_t key = task.visible.first(query) / kTile * kTile; key < end;",
          "for (std::int64_t key = 0; key < end;"),), RULES),
    Bug("attention: the last tile of queries that sees a tile of keys is left out",
        (("kernels/cuda/attention_backward_keys.cu", "if (next >= shared->end(time))", "if (next + kQueries >= shared->end(time))"),), CUDA_RULES),
    Bug("chat: a template's own system message is left out",
        (("src/cli/chat.cpp", "if (!system.empty()) system_ = begin", "if (system.empty()) system_ = begin"),), CHAT),
    Bug("chat: the vocabulary alone tells the form",
        (("src/cli/chat.cpp", "(own.empty() || own.names(form.tells))", "true"),), CHAT),
    Bug("chat: turns lose thoughts that the model's template keeps",
        (("src/cli/chat.cpp", "form_.behind_thoughts == nullptr || !thinks_ ?", "form_.behind_thoughts == nullptr ?"),), CHAT),
    Bug("chat: every model is told today's date",
        (("src/cli/chat.cpp", "own.names(\"strftime_now\") ? today : own.date();", "today;"),), CHAT),
    Bug("chat: what stands before the first turn stands before each",
        (("src/cli/chat.cpp", "(answered_ ? std::string(form_.end) + form_.between : system_) + said;",
          "(answered_ ? std::string(form_.end) + form_.between : \"\") + system_ + said;"),), CHAT),
    Bug("chat: the model's answers keep the blanks around them",
        (("src/cli/chat.cpp", "  if (!form_.trims) return ids;\n", "  if (form_.trims) return ids;\n"),), CHAT),
    Bug("chat: no blank stands before what Mistral 7B has said",
        (("src/cli/chat.cpp", "  if (leads_ == nullptr) return ids;\n", "  if (ids.size() < 99) return ids;\n"),), CHAT),
    Bug("chat: comments of a template are read as its texts",
        ((TEMPLATE, "source_[begin + 1] == '#' ? skip_behind(\"#}\") : block(", "block("),), CHAT),
    Bug("chat: a mark before a quote ends a template's text",
        ((TEMPLATE, "if (source_[at_] != '\\\\' || at_ + 1 == source_.size()) {", "if (source_[at_] != 0) {"),), CHAT),
    Bug("chat: a text begins whatever the template says",
        (("src/cli/chat.cpp", "!own.contains(tokenizer_.decode(ids_))) ids_.clear();", "false) ids_.clear();"),), CHAT),
    Bug("adapters beside tiles: they are cut into tiles, too",
        ((UNITS, "if (p.adapter || stays(i)) continue;", "if (stays(i)) continue;"),), IN_TILES),
    Bug("adapters beside tiles: their shards are not gathered",
        ((PROGRAM, "      if (const std::int32_t t = layout_.adapter_tile(unit); t >= 0) gather(t, is_last_gather(slot));\n", ""),),
        IN_TILES),
    Bug("adapters beside tiles: they are dropped behind the first tile",
        ((OPERANDS, "add(Operand::kAdapters, read(own.weight(t), ends && own.tile_is_dead(slot, t)));",
          "add(Operand::kAdapters, read(own.weight(t), own.tile_is_dead(slot, t)));"),), IN_TILES),
    Bug("adapters beside tiles: the model's tiles have sums of gradients",
        ((LAYOUT, "const bool accumulates = !layout_.is_frozen(u) || adapters;", "const bool accumulates = true;"),), IN_TILES),
    Bug("adapters beside tiles: the first micro-batch adds to what the sums held",
        ((OPERANDS, "if (t >= 0) sum(Operand::kAdapterAccumulator, t);",
          "if (t >= 0) add(Operand::kAdapterAccumulator, add_to(own.accumulator(t), false));"),), IN_TILES),
    Bug("adapters beside tiles: second halves walk through the model's tiles",
        ((OPERANDS, "return layout_.in_tiles(multiplied(slot)) && !adapters_alone;",
          "return layout_.in_tiles(multiplied(slot)) && (adapters_alone || true);"),), IN_TILES),
    Bug("adapters beside tiles: the second tile is taken for them",
        (("include/ziggurat/engine/layout.hpp", "static_cast<std::int32_t>(u.tiles.size()) - 1 : -1;", "1 : -1;"),), IN_TILES),
    Bug("adapters beside tiles: runs with adapters have whole layers",
        (("src/train/run_plan.cpp", "return config_.tiers.tiles == TierConfig::Tiles::kAuto &&",
          "return config_.tiers.tiles == TierConfig::Tiles::kAuto && !plan_.model_config.lora.on() &&"),), LORA_RUNS),
    Bug("copies at other places have the numbers of where they lie",
        ((UNITS, "      p.whole_numbers = true;\n", ""),), COPIES_ALIKE),
    Bug("copies' numbers are those of the held lines",
        (("include/ziggurat/model/param.hpp", "f(from, band.whole_line * line() + from - first, to - from);",
          "f(from, band.line * line() + from - first, to - from);"),), COPIES_ALIKE),
    Bug("copies in few bits go with heads of any size",
        (("src/train/run_checks.cpp", "head % kQuantBlock == 0) continue;", "head > 0) continue;"),),
        ("zg_test_train", "TensorRuns.*")),
    Bug("a product of one row adds its bias twice where it adds to what is there",
        ((GEMV, "p.accumulate ? p.y[j + r] + y : y;", "p.accumulate ? p.y[j + r] + y + (p.bias != nullptr ? p.bias[j + r] : 0) : y;"),),
        ONE_ROW),
    Bug("a product of one row leaves out the rows behind the last four",
        ((GEMV, "  for (; j < end; ++j) multiply<1>(p, j);\n", ""),), ONE_ROW),
    Bug("chat: what a model thought in earlier turns stays",
        (("src/cli/chat.cpp", "ids.erase(ids.begin(), end.base());", ""),), CHAT),
    Bug("chat: OLMo 2 is told by its vocabulary",
        (("src/cli/chat.cpp", ".family = kOlmo2,\n     ", ""),), CHAT),
    Bug("chat: later vocabularies have the turns of earlier ones",
        (("src/cli/chat.cpp", "has(form.tells) && has(form.also)", "has(form.tells)"),), CHAT),
    Bug("attention: heads of 256 have a document's first key left out of the backward",
        ((LARGE_HEADS, "if (key < queries.first[queries.of(n, i)])", "if (key <= queries.first[queries.of(n, i)])"),), CUDA_RULES),
    Bug("attention: heads of 256 have the slope of the cap left out of the backward",
        ((LARGE_HEADS, "if (scale.cap != 0) gradient *= cap_slope(w);", ""),), CUDA_RULES),
    Bug("attention: of heads of 256 a step that is partly hidden is left out",
        ((LARGE_HEADS, "(kOfQueries ? row + kStep : own + kWarpRows)) continue;", "(kOfQueries ? row + 1 : own + 1)) continue;"),), CUDA_RULES),
    Bug("attention: heads of 256 have the gradients of one query head of a group",
        ((LARGE_HEADS, "unit = place.unit * group, end_unit = unit + group,", "unit = place.unit * group, end_unit = unit + 1,"),),
        CUDA_RULES),
    Bug("attention: heads of 256 have their rows overwritten before all warps have them",
        ((LARGE_HEADS, "  __syncthreads();  // all warps have their rows in registers\n", ""),), CUDA_ATTENTION),
    Bug("attention: a scale of its own is left out of the backward",
        ((HOST_ATTENTION, "store_gradients(s.dq, width, n, size, scale.natural,",
          "store_gradients(s.dq, width, n, size, 1.0f / std::sqrt(static_cast<float>(size)),"),), RULES),
    Bug("attention: every sequence has the first one's documents",
        ((HOST_ATTENTION, "first_keys + sequence * s.time", "first_keys + sequence * 0"),), RULES),
    Bug("rope: the gradient is without the amplitude",
        (("kernels/host/rope.cpp", "angles_of<A>(known, table);",
          "angles_of<A>(known, [&] { auto t = table; if (inverse) t.amplitude = 1; return t; }());"),), ROPES),
    Bug("rope: the gradient is without the amplitude on a GPU",
        (("kernels/cuda/rope.cu", "cosine[j] *= rows.amplitude,", "if (!rows.inverse) cosine[j] *= rows.amplitude;\n    "),),
        CUDA_RULES),
    Bug("positions do not restart in documents",
        ((ARGUMENTS, "(first_keys == nullptr ? 0 : first_keys[row])", "(first_keys == nullptr ? 0 : 0 * first_keys[row])"),), ROPES),
    Bug("family: a norm by w in place of 1 + w",
        ((DECODER, "ops.rmsnorm(s, x, call.weight(index), c.norm_eps, y, stats, c.block.norm_weight);",
          "ops.rmsnorm(s, x, call.weight(index), c.norm_eps, y, stats);"),), FAMILIES),
    Bug("family: a window one token too long",
        ((ATTENTION, ".window = window && c.block.window < time ? c.block.window : 0,",
          ".window = window && c.block.window < time ? c.block.window + 1 : 0,"),), FAMILIES),
    Bug("family: norms of heads after they turn",
        ((DECODER, "  b.normalise_heads(qkv);\n  b.rope(qkv, false);\n",
          "  b.rope(qkv, false);\n  b.normalise_heads(qkv);\n"),), FAMILIES),
    Bug("family: local and global frequencies swapped",
        ((MODEL, "call.rope = window ? &window_rope_ : &rope_;", "call.rope = window ? &rope_ : &window_rope_;"),), FAMILIES),
    Bug("family: the biases of q, k and v dropped",
        ((DECODER, "return has_bias_ ? flat.col_range(piece.bias, piece.rows) : View{};", "return (void)flat, (void)piece, View{};"),),
        FAMILIES),
    Bug("family: Llama 3's factor inverted",
        ((ROPE_TABLES, "      f /= s.factor;\n      continue;", "      f *= s.factor;\n      continue;"),), FAMILIES),
    Bug("family: the amplitude of YaRN forgotten",
        ((ROPE_TABLES, ": amplitude(1);", ": 1;"),), FAMILIES),
    Bug("family: the cap of scores forgotten",
        ((ATTENTION, ".softcap = c.block.attention_softcap,", ".softcap = 0,"),), FAMILIES),
    Bug("family: the gradient of the embedding is not scaled",
        ((MODEL, "ops().scale(s, all, factor, room), all = room;", "ops().cast(s, all, room), all = room;"),), FAMILIES),
    Bug("family: the cap of logits is not in the loss",
        ((HEAD, "const double softcap = call.config.block.final_softcap;", "const double softcap = 0;"),), FAMILIES),
    Bug("family: parts of fused matrices are read from the first one",
        (("src/model/hf_weights.cpp", "first + whole, first + whole + n,", "whole, whole + n,"),), FAMILIES),
    Bug("family: files have k before q",
        ((UNITS, "      p.file_row = rows;\n", "      p.file_row = rows == 0 ? p.whole_rows : 0;\n"),), FAMILIES),
    Bug("family: checkpoints do not record the block",
        (("src/train/checkpoint_bits.cpp", "      add(kBlock, block_text(m));\n", "      (void)block_text(m);\n"),),
        ("zg_test_train", "CheckpointFamilies*")),
    Bug("family: norms of heads are not summed over parts",
        ((UNITS, "b.vector(fmt::format(\"self_attn.{}_norm.weight\", name), n, b.all(n), one, part.parts > 1);",
          "b.vector(fmt::format(\"self_attn.{}_norm.weight\", name), n, b.all(n), one);"),),
        ("zg_test_model", "*Parts*every_option*")),
    Bug("tokenizer: of equal pairs the rightmost is joined first",
        ((MERGES, "merges[i]->rank < merges[best]->rank", "merges[i]->rank <= merges[best]->rank"),), TOKENS),
    Bug("tokenizer: of equal pairs the rightmost is joined first in long pieces",
        ((MERGES, "rank > other.rank : at > other.at;", "rank > other.rank : at < other.at;"),), TOKENS),
    Bug("tokenizer: marks do not block the marks behind them",
        (("src/data/unicode.cpp", "starter < kept && (last_class < its_class || last_class == -1);",
          "starter < kept && (last_class < its_class || last_class >= -1);"),), TOKENS),
    Bug("tokenizer: whole words go through the merges", ((HF_TOKENS, "if (whole_first_) {\n      const auto it",
        "if (whole_first_ && piece.empty()) {\n      const auto it"),), TOKENS),
    Bug("tokenizer: whole words come first everywhere", ((HF_TOKENS, "whole_first_(d.ignore_merges) {",
        "whole_first_(d.ignore_merges || true) {"),), TOKENS),
    Bug("copies: the version that is being copied is unpinned",
        ((SAVER, "it = it->first == held_ ? std::next(it) : unpin(it);", "it = unpin(it);"),), BEHIND),
    Bug("copies: the checkpoint that is being copied is removed",
        ((CHECKPOINT_WRITER, "++kept <= keep || entry.number == held)", "++kept <= keep || entry.number == -held - 1)"),), BEHIND),
    Bug("copies: the run has no version for what is being copied",
        (("include/ziggurat/config/checkpoint.hpp", "(exports.path.empty() ? 0 : 1)", "(exports.path.empty() ? 0 : 0)"),), BEHIND),
    Bug("copies: one that failed counts as made",
        ((EXPORTER, "    const Checkpoint checkpoint(from.path);", "    copied_ = from.number;\n    const Checkpoint checkpoint(from.path);"),), BEHIND),
    Bug("copies: another run's copies are gone on from",
        (("src/train/run_checkpoints.cpp", "return run.empty() || run == own;", "return true;"),), BEHIND),
    Bug("copies: they do not give way to the training",
        ((EXPORTER, "return waits && moved - moved_ < io::kFairShare * part_ &&", "return waits && moved - moved_ < part_ &&"),), BEHIND),
    Bug("epochs: all have the order of the first",
        ((DATASET, "number / n), n)", "0 * number), n)"),), ("zg_test_data", "Epochs.*")),
    Bug("epochs: each step begins anew",
        ((DATASET, "step * s.step_sequences + first_sequence + i, n", "0 * step + first_sequence + i, n"),),
        ("zg_test_data", "Epochs.*")),
    Bug("sinks: they take no part in the sum",
        ((HOST_ATTENTION, "sum = sum * rescale[c] + std::exp2(sink - top);", "sum = sum * rescale[c];"),), RULES),
    Bug("sinks: what was summed before is not rescaled",
        ((HOST_ATTENTION, "s.factor[c] = rescale[c] / s.sum[i][c];", "s.factor[c] = 1.0f / s.sum[i][c];"),), RULES),
    Bug("sinks: the gradient has the other sign",
        ((HOST_ATTENTION, "x.d_sinks[h] -= static_cast<Acc<T>>(sum);", "x.d_sinks[h] += static_cast<Acc<T>>(sum);"),), RULES),
    Bug("sinks: they take no part in the sum on a GPU",
        (("kernels/cuda/attention.hpp", "sum = sum * rescale + static_cast<A>(exp2(of_sink - top));",
          "sum = sum * rescale + 0 * of_sink;"),), CUDA_RULES),
    Bug("sinks: the gradient of the last rows is left out on a GPU",
        (("kernels/cuda/attention_sinks.cu", "row < rows; row += kWarps", "row + 1 < rows; row += kWarps"),), CUDA_RULES),
    Bug("sinks: with Ulysses all ranks have the first heads' sinks",
        ((ATTENTION, "numbers.col_range(call.shape.part.part * shape.heads, shape.heads)", "numbers.col_range(0 * call.shape.part.part, shape.heads)"),),
        IN_PARTS),
    Bug("sinks: each block of a ring has them",
        ((ATTENTION, "step == 0 ? call.sinks : View()", "call.sinks"),), IN_PARTS),
    Bug("ring: a window is counted in the rows of a part",
        ((VISIBLE, "queries.at(query) - window + 1;", "query - window + 1;"),), ("zg_test_kernels", "*AttentionBlocks*:VisibleBlockKeys*")),
    Bug("ring: keys of a window are counted in whole sequences",
        ((VISIBLE, "return keys.rows_before(in_document > in_window ? in_document : in_window);",
          "return in_document > in_window ? in_document : in_window > 0 ? in_window : 0;"),), IN_PARTS),
    Bug("ring: queries of the later chunk have the documents of the earlier one",
        ((ATTENTION, "x.col_range(first_query, block.query_rows())", "x.col_range(0, block.query_rows())"),), IN_PARTS),
    Bug("ring: queries that see none of the keys are merged with nothing",
        ((HOST_ATTENTION, "s.sum[tile][c] > 0 ? std::exp(here - all) * rescale[c] / s.sum[tile][c] : 0.0f;",
          "std::exp(here - all) * rescale[c] / s.sum[tile][c];"),), ("zg_test_kernels", "*AttentionBlocks*")),
    Bug("ulysses: the documents are those of this rank's rows",
        ((ATTENTION, "documents = call.documents.col_range(rows, rows *", "documents = call.documents.col_range(0, rows *"),), IN_PARTS)
)


def run(command, cwd, seconds=600):
    """Exit code and output; the code is none where it took too long."""
    try:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", timeout=seconds)
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        return None, (late.stdout or b"").decode(errors="replace")


def must(command, cwd):
    code, out = run(command, cwd, 3600)
    if code != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {code}:\n{out[-3000:]}")


def prepare(tree, jobs, bugs):
    """The tree with a build of these bugs' test programs, which later ones only change."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        source, target = ROOT / name, tree / name
        if not source.is_file() or (target.is_file() and target.read_bytes() == source.read_bytes()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)
    must(["cmake", "-S", tree, "-B", tree / "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DZG_TESTS=ON"], tree)
    must(["ninja", f"-j{jobs}", "-C", "build", *sorted({bug.tests[0] for bug in bugs})], tree)


def package_in(tree, built):
    """The package, with its modules from a build, and its tests; the files in Python are those of the tree."""
    for folder in ("src/python/ziggurat", "tests/python", "tools/examples"):
        shutil.copytree(ROOT / folder, tree / folder, dirs_exist_ok=True)
    for module in built.glob("ziggurat/*.so"):
        shutil.copy2(module, tree / "src/python/ziggurat")


def seen_by_python(bug, tree, python):
    """The same as seen_by(), for a bug of the Python package."""
    program, test = bug.tests
    here = {**os.environ, "PYTHONPATH": str(tree / "src/python")}
    command = [python, "-B", str(tree / "tests/python" / program), test]
    try:
        done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired:
        return "a hang", True
    if done.returncode == 0 or "skipped" in done.stdout + done.stderr:
        return "no test", False
    return f"{program} {test}", re.search(r"^(FAIL|ERROR): ", done.stderr, re.M) is not None or done.returncode < 0


def seen_by(bug, tree, jobs):
    """Which test turned red, or what went wrong; and whether that is one."""
    program, tests = bug.tests
    code, out = run(["ninja", f"-j{jobs}", "-C", "build", program], tree, 1200)
    if code != 0:
        return f"does not compile: {out[-600:]}", False
    code, out = run([tree / "build/tests" / program, f"--gtest_filter={tests}", "--gtest_fail_fast", "--gtest_brief=1"], tree, 400)
    if code == 0:
        return "no test", False
    failed = re.search(r"\[  FAILED  \] ([\w/.]+)", out)
    if failed:
        return failed.group(1), True
    asserted = re.search(r"assertion failed: (.*)", out)
    return asserted.group(0) if asserted else "a hang" if code is None else f"exit code {code}", True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--work", type=pathlib.Path, help="directory of the copy and its build")
    what.add_argument("--check", action="store_true", help="only look whether every bug fits the code")
    parser.add_argument("--only", action="append", help="bugs whose name has this part; may be repeated")
    parser.add_argument("--package", type=pathlib.Path, help="the built Python package, whose bugs are tried then")
    parser.add_argument("--python", default=sys.executable, help="for the tests of the Python package")
    parser.add_argument("--jobs", type=int, default=1, help="of the build")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table")
    args = parser.parse_args()
    of_python = tuple(Bug(name, ((file, old, new),), (program, test))
                      for name, file, old, new, program, test in seeded_python.BUGS)
    known = BUGS + of_python if args.check else of_python if args.package else BUGS
    bugs = [bug for bug in known if any(part in bug.name for part in args.only or [""])]
    for bug in bugs:
        texts = {name: (ROOT / name).read_text() for name, _, _ in bug.changes}
        for name, old, new in bug.changes:
            if texts[name].count(old) != 1:
                sys.exit(f"{bug.name}: {name} has not exactly one {old!r}: adapt the bug to the code")
            texts[name] = texts[name].replace(old, new)
    if args.check:
        return print(f"{len(bugs)} bugs fit the code")
    tree = args.work.resolve()
    package_in(tree, args.package) if args.package else prepare(tree, args.jobs, bugs)
    table, missed = ["| bug | red |", "| --- | --- |"], 0
    for bug in bugs:
        begin = time.monotonic()
        before = {name: (tree / name).read_text() for name, _, _ in bug.changes}
        try:
            for name, old, new in bug.changes:
                text = (tree / name).read_text()
                (tree / name).write_text(text.replace(old, new))
            seen = seen_by_python(bug, tree, args.python) if args.package else seen_by(bug, tree, args.jobs)
        finally:
            for name, text in before.items():
                (tree / name).write_text(text)
        missed += not seen[1]
        table.append(f"| {bug.name} | {seen[0]} |")
        print(f"{table[-1]}  {time.monotonic() - begin:.0f} s", flush=True)
    if args.out:
        args.out.write_text("\n".join(table) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
