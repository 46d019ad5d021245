#include "comm/worlds.hpp"

namespace zg::test {

World make_world(int size, const CommOptions& options) {
  return {.devices = {}, .ranks = make_local_ranks(size, options)};
}

std::vector<int> world_sizes() {
  return {1, 2, 3, 4, 8};
}

std::int64_t large_count() {
  return 100003;
}

}  // namespace zg::test
