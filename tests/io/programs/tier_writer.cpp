// A run to be killed, refused or raced with: opens a tier in DIR and writes to it.
//
//   zg_tier_writer DIR loop     opens, writes, reads back, ends, and so on, until killed
//   zg_tier_writer DIR hold     one engine; "ready" on stdout; writes on until stdin ends, reads all back,
//   ends zg_tier_writer DIR race N   N openings; one that is refused since another has DIR does not count as
//   failed
//
// Exit code 0: all that was read is what was written, and no other data file was there meanwhile; 1: not so;
// 2: an error, on stderr.
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "io/drive_file.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/engine.hpp"

namespace {

using namespace zg;

constexpr std::int64_t kBytes = 4 * kMiB, kPiece = kMiB;

std::unique_ptr<io::Engine> open_tier(const std::string& directory) {
  io::EngineOptions options;
  options.block_size = 256 * kKiB;
  options.queue_depth = 4;
  return io::make_engine(options, {{.path = directory, .bytes = kBytes}});
}

class Pieces {
 public:
  Pieces() {
    void* memory = mmap(nullptr, 2 * kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error(Errc::kMemory, "mmap", errno_text(errno));
    data_ = static_cast<char*>(memory);
  }
  // A pattern that no other process, place or round writes.
  void write(io::Engine& engine, int round) {
    for (std::int64_t at = 0; at < kBytes; at += kPiece) {
      fill(at, round);
      const io::Result result =
          engine.wait(engine.submit({.op = io::Op::kWrite, .offset = at, .data = data_, .bytes = kPiece}));
      if (!result.ok()) throw Error(Errc::kIo, "write", errno_text(result.error));
    }
  }
  bool are_there(io::Engine& engine, int round) {
    bool same = true;
    for (std::int64_t at = 0; at < kBytes; at += kPiece) {
      fill(at, round);
      const io::Result result = engine.wait(
          engine.submit({.op = io::Op::kRead, .offset = at, .data = data_ + kPiece, .bytes = kPiece}));
      same = same && result.ok() && std::memcmp(data_, data_ + kPiece, kPiece) == 0;
    }
    return same;
  }

 private:
  void fill(std::int64_t at, int round) {
    for (std::int64_t i = 0; i < kPiece; i += 8) {
      const std::int64_t word = (at + i) ^ (std::int64_t{getpid()} << 40) ^ (std::int64_t{round} << 24);
      std::memcpy(data_ + i, &word, sizeof(word));
    }
  }
  char* data_ = nullptr;  // goes with the process
};

bool is_only_one(const std::string& directory) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    files += entry.path().extension() == ".tier" && entry.is_regular_file() && !entry.is_symlink() ? 1 : 0;
  return files == 1;
}

bool loop(const std::string& directory) {
  Pieces pieces;
  for (int round = 0;; ++round) {
    const auto engine = open_tier(directory);
    pieces.write(*engine, round);
    if (!pieces.are_there(*engine, round)) return false;
  }
}

bool hold(const std::string& directory) {
  Pieces pieces;
  const auto engine = open_tier(directory);
  pieces.write(*engine, 0);
  puts("ready");
  fflush(stdout);
  int round = 0;
  for (pollfd input{0, POLLIN, 0}; poll(&input, 1, 0) == 0;) pieces.write(*engine, ++round);
  return pieces.are_there(*engine, round);
}

// Files alone, so that it is the openings and ends that meet.
bool race(const std::string& directory, int rounds) {
  bool good = true;
  for (int round = 0; round < rounds;) {
    try {
      const io::DriveFile file({.path = directory, .bytes = 4096});
      const std::int64_t mine = (std::int64_t{getpid()} << 32) + round++;
      std::int64_t back = 0;
      alignas(4096) static char page[4096];
      std::memcpy(page, &mine, sizeof(mine));
      good = good && pwrite(file.fd(), page, sizeof(page), 0) == sizeof(page);
      good = is_only_one(directory) && good;
      good = good && pread(file.fd(), page, sizeof(page), 0) == sizeof(page);
      std::memcpy(&back, page, sizeof(back));
      good = good && back == mine;
    } catch (const Error& e) {
      if (e.message().find("is in use by") == std::string::npos || e.where() != directory) throw;
      std::this_thread::yield();
    }
  }
  return good;
}

bool run(const std::string& directory, const std::string& mode, int rounds) {
  if (mode == "loop") return loop(directory);
  if (mode == "hold") return hold(directory);
  return race(directory, rounds);
}

}  // namespace

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (argc < 3) return 2;
  log::set_level(log::Level::kError);
  // Whoever kills it counts from here, not from the start of the process.
  puts("begin");
  fflush(stdout);
  try {
    return run(argv[1], argv[2], argc > 3 ? std::atoi(argv[3]) : 1) ? 0 : 1;
  } catch (const std::exception& e) {
    fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
