#include "io/queue.hpp"
#include "ziggurat/base/error.hpp"

namespace zg::io {

std::unique_ptr<Queue> make_aio_queue(int, int) {
  throw Error(Errc::kIo, "libaio", "not built");
}

}  // namespace zg::io
