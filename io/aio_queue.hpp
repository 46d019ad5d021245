// The kernel's own AIO, with the system calls as values, so that a test can make them do as rarely happens.
#pragma once
#include <libaio.h>

#include <functional>
#include <memory>

#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {

struct AioCalls {
  std::function<int(int, io_context_t*)> setup = io_setup;
  std::function<int(io_context_t, long, iocb**)> submit = io_submit;  // of blocks
};

std::unique_ptr<Queue> make_aio_queue(int fd, int depth, AioCalls calls);

// Why io_setup() for so many events failed, and what helps.
Error aio_setup_error(int error, int events);

}  // namespace zg::io
