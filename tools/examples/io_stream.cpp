// Streams named tensors to one or several drives and back, with nothing but the headers of ziggurat/io and
// base.
//
//   io_stream [-n TENSORS] [-s SIZE] [-b BUFFERS] DIRECTORY...        one directory a drive; README.md builds
//   it
//
// The engine makes a file in each directory; the volume spreads each tensor over all of them, by the drives'
// bandwidth, and compares its checksums when it is read. A few buffers take turns, so that the drives have
// work while this thread makes bytes, or looks at them.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

#include "ziggurat/base/buffer.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/units.hpp"
#include "ziggurat/io/volume.hpp"

using namespace zg::io;

// A buffer and the transfer that has it.
struct Slot final : ExtentCompletion {
  zg::Buffer buffer;
  ExtentResult result;
  std::atomic<bool> busy{false};

  // On an I/O thread, so it is short and does not wait: whoever waits for the slot does the rest.
  void on_extent(ExtentId, std::uint64_t, ExtentResult r) override {
    result = r;
    busy = false;
    busy.notify_one();
  }
};

// Writes or reads all tensors, as many at a time as there are slots.
void stream(Volume& volume, Op op, const std::vector<ExtentId>& tensors, std::deque<Slot>& slots,
            std::int64_t bytes) {
  const auto begin = zg::Clock::now();
  for (std::size_t i = 0; i < tensors.size() + slots.size(); ++i) {
    Slot& slot = slots[i % slots.size()];
    char* const data = slot.buffer.data();
    if (i >= slots.size()) {  // first the tensor that has the slot
      const std::size_t t = i - slots.size();
      slot.busy.wait(true);
      // Read every result. explain() names the tensor, the place, the drive and the cause.
      if (!slot.result.ok())
        throw zg::Error(zg::Errc::kIo, "io_stream", volume.explain(tensors[t], op, slot.result));
      if (data[bytes - 1] != static_cast<char>(t))  // here you would use the bytes
        throw zg::Error(zg::Errc::kIo, "io_stream", "read other bytes than were written");
    }
    if (i >= tensors.size()) continue;
    slot.busy = true;
    const ExtentTransfer transfer{.extent = tensors[i], .data = data, .completion = &slot};
    if (op == Op::kWrite) {
      std::memset(data, static_cast<char>(i), static_cast<std::size_t>(bytes));  // here you would make them
      volume.write(transfer);
    } else {
      volume.read(transfer);
    }
  }
  const double seconds = zg::seconds_between(begin, zg::Clock::now());
  std::printf("%-7s %s\n", op == Op::kWrite ? "written" : "read",
              zg::format_rate(static_cast<double>(bytes * std::ssize(tensors)) / seconds).c_str());
}

int run(int count, char** words) {
  std::int64_t sizes[3] = {64, 16 * zg::kMiB, 4};  // tensors, bytes of each, buffers
  for (int flag; (flag = getopt(count, words, "n:s:b:")) != -1;) {
    const auto value = flag != '?' ? zg::parse_bytes(optarg) : std::nullopt;
    if (!value || *value < 1)
      throw zg::Error(zg::Errc::kUsage, "io_stream", "expected -n, -s or -b and a number");
    sizes[flag == 'n' ? 0 : flag == 's' ? 1 : 2] = *value;
  }
  const auto [number, bytes, buffers] = sizes;
  if (optind == count) throw zg::Error(zg::Errc::kUsage, "io_stream", "needs a directory on each drive");

  // With several drives each gets more than its equal part, since a faster one will hold more. Space is given
  // in whole grains.
  const VolumeOptions options;
  const std::int64_t all = number * zg::round_up(bytes, options.grain), drives = count - optind;
  std::vector<DriveOptions> files;
  for (int i = optind; i < count; ++i)
    files.push_back(
        {.path = words[i], .bytes = drives == 1 ? all : zg::round_up(2 * all / drives, options.grain)});

  // In this order, so that it ends well however it ends: the volume goes first and waits for its transfers,
  // then the engine lets go of the buffers and removes its files.
  std::deque<Slot> slots(static_cast<std::size_t>(buffers));
  const auto engine = make_engine({}, files);
  const auto volume = make_volume(*engine, options);
  for (Slot& slot : slots) {
    slot.buffer.reserve(bytes);
    engine->register_memory(slot.buffer.data(), slot.buffer.size());  // once; each transfer then costs less
  }
  std::printf("%s\n", engine->describe().c_str());

  std::vector<ExtentId> tensors;
  for (std::int64_t i = 0; i < number; ++i)
    tensors.push_back(volume->create({.name = "tensor." + std::to_string(i), .bytes = bytes}));
  stream(*volume, Op::kWrite, tensors, slots, bytes);
  stream(*volume, Op::kRead, tensors, slots, bytes);
  for (int d = 0; d < engine->drive_count(); ++d) {
    const DriveReport r = engine->report(d);
    std::printf("%-7s %s: wrote %s, read %s, depth %d, share of the next write %.0f%%\n", r.name.c_str(),
                r.path.c_str(), zg::format_bytes(r.counters.write_bytes).c_str(),
                zg::format_bytes(r.counters.read_bytes).c_str(), r.depth, 100 * volume->space(d).share);
  }
  return 0;
}

int main(int count, char** words) {
  try {
    return run(count, words);
  } catch (const zg::Error& e) {  // its text says where, what and how to mend it
    std::fprintf(stderr, "%s\n", e.what());
    return e.exit_code();
  } catch (const std::exception& e) {  // no memory for the buffers
    std::fprintf(stderr, "io_stream: %s\n", e.what());
    return 1;
  }
}
