#include "io/depth_controller.hpp"

namespace zg::io {

void DepthController::done(Clock::time_point, std::int64_t, double, bool) {
  (void)cap_;
}

}  // namespace zg::io
