// Schedules of a pipeline: which layers a stage computes with which micro-batch, and when the stages pass on
// results. Pure functions from shapes to lists; they use neither tensors nor devices.
//
// The layers are cut into stages * chunks ranges, called chunks. Stage s has the chunks c * stages + s, for c
// from 0 to chunks - 1, so a micro-batch goes around the stages once for each chunk of a stage. A forward
// passes activations to the next chunk; a backward passes their gradients to the chunk before. A tied
// embedding belongs to the first stage. Once a step, the first stage sends it to the last stage as the output
// matrix, and receives the gradient of the output matrix.
//
// The work of all stages is one ordered list, and each stage does its own entries in that order. Passing a
// result is one entry, for the sender and the receiver. So even if every send waits until it has been
// received, and a stage does one thing at a time, the first entry that is not done can always proceed: there
// is no deadlock.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ziggurat/step/options.hpp"

namespace zg {

struct PipelineShape {
  int stages = 1, chunks = 1;
  int micro_batches = 1;
  PipelineSchedule schedule = PipelineSchedule::kBreadthFirst;
  int group = 0;  // PipelineOptions::group

  int parts() const { return stages * chunks; }
  int part(int stage, int chunk) const { return chunk * stages + stage; }
};
// The schedule's name in the configuration: "breadth_first", ...
const char* name_of(PipelineSchedule schedule);
// Why no schedule has this shape, as a message for the user; empty if one does.
std::string problem_of(const PipelineShape& shape);

// The work of a stage on one chunk and one micro-batch.
struct PipelineStep {
  enum class Kind : std::uint8_t {
    kForward,
    kBackward,        // both of the gradients below
    kInputGradient,   // zero-bubble: the gradient that the stage before waits for
    kWeightGradient,  // zero-bubble: the gradients of the weights, made later
  };
  Kind kind = Kind::kForward;
  int chunk = 0, micro_batch = 0;
  bool operator==(const PipelineStep&) const = default;
};
enum class PipelinePass { kTraining, kEvaluation };
// The steps that a stage computes, in order. Micro-batches pass each chunk in ascending order, in forward and
// in backward, so every schedule adds up micro-batches in the same order. problem_of() must be empty.
std::vector<PipelineStep> pipeline_steps(const PipelineShape& shape, int stage, PipelinePass pass);
// The largest number of pairs of chunk and micro-batch whose activations a stage holds at a time.
int live_activations(std::span<const PipelineStep> steps);

// The idle time that theory predicts, in units of a stage's work in a step: (p - 1) / (M v) for p stages of v
// chunks and M micro-batches; (p - 1 + max(0, p - M)) / 3 M for the zero-bubble schedule, if its three kinds
// of steps take equally long.
double bubble_formula(const PipelineShape& shape);

// One entry of the list of all stages' work.
struct PipelineEvent {
  enum class Kind : std::uint8_t {
    kStep,           // of `stage`
    kActivation,     // `stage` sends the output of a chunk to `to`
    kGradient,       // `stage` sends the gradient of a chunk's input to `to`
    kTable,          // `stage` sends the tied embedding's weight to `to`
    kTableGradient,  // the gradient of the tied embedding's weight, likewise
  };
  Kind kind = Kind::kStep;
  int stage = 0, to = -1;
  PipelineStep step;          // the step done, or the step whose result is passed
  double begin = 0, end = 0;  // by PipelineTimes; passing takes no time
  bool is_at(int s) const { return stage == s || to == s; }
};
struct PipelineTimes {
  double forward = 1, input_gradient = 1, weight_gradient = 1;
};
// The events of all stages, in an order in which each comes after the events that it depends on. `tied`: the
// embedding is tied, so its weight and gradient are passed.
std::vector<PipelineEvent> pipeline_events(const PipelineShape& shape, PipelinePass pass, bool tied,
                                           const PipelineTimes& times = {});

// The number n of tensors that a chunk of a stage needs for activations, for their gradients, or for the
// activations kept between the halves of a backward, if micro-batch m uses tensor m mod n. A tensor is in use
// from the event that receives or makes its content to the last event that reads it or passes it on. With a
// tied embedding, the embedding's backward waits for the gradient of the output matrix.
enum class PipelineBuffer { kActivation, kGradient, kKept };
int pipeline_buffers(std::span<const PipelineEvent> events, const PipelineShape& shape, int stage, int chunk,
                     PipelineBuffer which);

// Splits the layers into `parts` chunks. Returns the first layer of each chunk, and then the number of
// layers. The split minimizes the cost of the most expensive chunk, and then the sum of the squared costs.
// `before` and `after` are additional costs of the first and of the last chunk. Every chunk has at least one
// layer, so there must be at least `parts` layers.
std::vector<std::int32_t> split_layers(std::span<const double> layer_costs, double before, double after,
                                       int parts);

// The number of layers that each chunk should have, judging by the `seconds` that each stage took with the
// split `first` (split_layers()). The cost of a layer is the mean on the stages between the first and the
// last, or on the first stage if the pipeline has only two. The embedding and the head cost the rest of the
// first and last stages' time. Empty: the slowest stage would not be faster by a tenth.
std::vector<std::int32_t> layers_by_time(const PipelineShape& shape, std::span<const std::int32_t> first,
                                         std::span<const double> seconds);

// The schedule as text, with one row for each stage. "a3" is the forward of micro-batch 3 through the first
// chunk. "A3" is its backward, which is drawn twice as long, or its first half, with "W3" as the second half.
// "." is idle time. Rows are cut at `width` characters.
std::string drawing_of(const PipelineShape& shape, int width = 110);

}  // namespace zg
