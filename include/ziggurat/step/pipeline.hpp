// Schedules of a pipeline: which layers a stage computes with which micro-batch, and when the stages pass
// results on. Pure functions from numbers to lists, which know neither tensors nor devices.
//
// The layers are cut into stages * chunks parts. Stage s has the parts c * stages + s, its chunks, so a
// micro-batch goes round the stages once for each chunk. A stage passes on the activations of a forward and
// their gradients of a backward. A tied embedding belongs to the first stage, which passes it to the last one
// as output matrix once a step, and gets the gradient of that back.
//
// What all stages do is a list in one order, of which each stage does its part in that order. A result is
// passed in one place of the list, for both ends. So even if every send waits until it has been received, and
// nothing runs beside anything, whatever comes first among what is left can go on: there is no deadlock.
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
  int group = 0;  // PipelineOptions

  int parts() const { return stages * chunks; }
  int part(int stage, int chunk) const { return chunk * stages + stage; }
};
// "breadth_first", ...: as the configuration calls it.
const char* name_of(PipelineSchedule schedule);
// Why there is no such schedule, as "... is found, ... is expected". Empty: there is one.
std::string problem_of(const PipelineShape& shape);

// Work of a stage on one chunk and one micro-batch.
struct PipelineStep {
  enum class Kind : std::uint8_t {
    kForward,
    kBackward,        // both of the following
    kInputGradient,   // zero-bubble: what the stage before waits for
    kWeightGradient,  // zero-bubble: later
  };
  Kind kind = Kind::kForward;
  int chunk = 0, micro_batch = 0;
  bool operator==(const PipelineStep&) const = default;
};
enum class PipelinePass { kTraining, kEvaluation };
// What a stage computes in a step, in order. Micro-batches pass each chunk in ascending order, in forward and
// in backward, so sums over them are made alike by every schedule. problem_of() must be empty.
std::vector<PipelineStep> pipeline_steps(const PipelineShape& shape, int stage, PipelinePass pass);
// The most pairs of chunk and micro-batch whose activations a stage holds at a time.
int live_activations(std::span<const PipelineStep> steps);

// Idle time by formula, in units of a stage's work in a step: (p - 1) / (M v) for p stages of v chunks and M
// micro-batches; (p - 1 + max(0, p - M)) / 3 M for the zero-bubble schedule, if its three kinds of steps take
// equally long.
double bubble_formula(const PipelineShape& shape);

// One entry of the list that all stages share.
struct PipelineEvent {
  enum class Kind : std::uint8_t {
    kStep,           // of `stage`
    kActivation,     // from the end of a chunk of `stage` to `to`
    kGradient,       // from the beginning of a chunk of `stage` to `to`
    kTable,          // the tied embedding's weight
    kTableGradient,  // and its gradient
  };
  Kind kind = Kind::kStep;
  int stage = 0, to = -1;
  PipelineStep step;          // or the one whose result is passed
  double begin = 0, end = 0;  // if every stage takes as long for each of its steps, and passing takes none
  bool is_at(int s) const { return stage == s || to == s; }
};
struct PipelineTimes {
  double forward = 1, input_gradient = 1, weight_gradient = 1;
};
// All of them, in an order in which none comes before what it needs. `tied`: the table is passed.
std::vector<PipelineEvent> pipeline_events(const PipelineShape& shape, PipelinePass pass, bool tied,
                                           const PipelineTimes& times = {});

// The number of tensors that a chunk of a stage needs for activations, for their gradients, or for what is
// kept between the halves of a backward, if micro-batch m takes number m modulo it. A tensor is taken from
// where its content arrives or is made, to where it has been used or passed on. With a tied embedding its
// backward waits for the gradient of the table.
enum class PipelineBuffer { kActivation, kGradient, kKept };
int pipeline_buffers(std::span<const PipelineEvent> events, const PipelineShape& shape, int stage, int chunk,
                     PipelineBuffer which);

// The first layer of each of `parts` parts, and the number of layers behind them: the most that a part costs
// is least, and then the sum of the squares. `before` and `after` are costs beside those of the layers, in
// the first and in the last part. Every part has a layer: there must be as many.
std::vector<std::int32_t> split_layers(std::span<const double> layer_costs, double before, double after,
                                       int parts);

// The number of layers that each part would have if they were divided by how long the stages took, by the
// split `first` that they had (split_layers()): a layer costs what it did on the stages between the first and
// the last one, or where there are none, on the first; the rest of the time is the embedding's and the
// head's. Empty: the slowest stage would not be faster by a tenth.
std::vector<std::int32_t> layers_by_time(const PipelineShape& shape, std::span<const std::int32_t> first,
                                         std::span<const double> seconds);

// The schedule as text, a row a stage: "a3" is the forward of micro-batch 3 through the first chunk, "A3" its
// backward, which is drawn twice as long, or in halves "A3" and "W3", "." idle time. Rows are cut at `width`
// characters.
std::string drawing_of(const PipelineShape& shape, int width = 110);

}  // namespace zg
