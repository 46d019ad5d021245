#include "ziggurat/io/hash.hpp"

#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "ziggurat/io/volume.hpp"

namespace zg::io {

struct Hash::State {
  XXH3_state_t xxh;
};

Hash::Hash() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh);
}
Hash::~Hash() = default;
Hash::Hash(Hash&&) noexcept = default;
Hash& Hash::operator=(Hash&&) noexcept = default;

void Hash::update(const void* data, std::int64_t bytes) {
  XXH3_64bits_update(&state_->xxh, data, static_cast<std::size_t>(bytes));
}

std::uint64_t Hash::value() const {
  return XXH3_64bits_digest(&state_->xxh);
}

std::uint64_t hash_of(std::string_view text) {
  return checksum(text.data(), static_cast<std::int64_t>(text.size()));
}

std::string hash_text(std::uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

}  // namespace zg::io
