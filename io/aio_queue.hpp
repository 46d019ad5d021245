// The kernel's AIO behind values that hold its system calls, so that a test can replace them with calls that
// fail as the real ones seldom do.
#pragma once
#include <libaio.h>

#include <functional>
#include <memory>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {

struct AioCalls {
  std::function<int(int, io_context_t*)> setup = io_setup;
  std::function<int(io_context_t, long, iocb**)> submit = io_submit;  // used for blocks, not for wake-ups
};

std::unique_ptr<Queue> make_aio_queue(int fd, int depth, AioCalls calls);

// The error to throw when io_setup() for `events` requests has failed with this errno, with a hint.
Error aio_setup_error(int error, int events);

}  // namespace zg::io
