// XXH3 (64 bit) of bytes that come in parts. The value is that of checksum() (volume.hpp) over all of them.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace zg::io {

// One thread at a time.
class Hash {
 public:
  Hash();
  ~Hash();
  Hash(Hash&&) noexcept;
  Hash& operator=(Hash&&) noexcept;

  void update(const void* data, std::int64_t bytes);
  std::uint64_t value() const;  // of all bytes so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::uint64_t hash_of(std::string_view text);
// 16 hexadecimal digits.
std::string hash_text(std::uint64_t hash);

}  // namespace zg::io
