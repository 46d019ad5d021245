// Streams tensors that are larger than host memory through it, step by step, with the tiered store.
//
//   store_stream [--total SIZE] [--host SIZE] [--device SIZE] [--tensor SIZE] [--steps N] DIRECTORY...
//
// One directory a drive; README.md builds it. Each step reads every tensor at the device, looks at its bytes,
// and writes others at the host: as a trainer reads weights and updates them. The store moves segments
// between NVMe, host and device meanwhile, and fetches ahead, since the first step has shown it what the next
// ones will do.
#include <getopt.h>

#include <algorithm>
#include <cstdio>

#include "ziggurat/base/units.hpp"
#include "ziggurat/store/open.hpp"

// Contents that tell which segment they are of, and in which step they were written.
std::uint64_t word(zg::SegmentId segment, int step, std::int64_t i) {
  return static_cast<std::uint64_t>(segment) << 40 ^ static_cast<std::uint64_t>(step) << 32 ^
         static_cast<std::uint64_t>(i);
}
void write(const zg::Lease& lease, zg::SegmentId segment, int step) {
  auto* words = static_cast<std::uint64_t*>(lease.data());
  for (std::int64_t i = 0; i < lease.bytes() / 8; ++i) words[i] = word(segment, step, i);
}
void check(const zg::Lease& lease, zg::SegmentId segment, int step) {
  const auto* words = static_cast<const std::uint64_t*>(lease.data());
  bool same = true;
  for (std::int64_t i = 0; i < lease.bytes() / 8; ++i) same = same && words[i] == word(segment, step, i);
  if (!same) throw zg::Error(zg::Errc::kIo, "store_stream", "read other bytes than were written");
}

// A line for each step; the counters of the store grow all the time, so two readings make one.
void print(int step, double seconds, const zg::StoreStatistics& now, const zg::StoreStatistics& before) {
  std::printf("step %-2d %8s, stall %5.1f%%", step, zg::format_seconds(seconds).c_str(),
              100 * (now.waited_seconds - before.waited_seconds) / seconds);
  for (const zg::Link link : {zg::kNvmeRead, zg::kNvmeWrite, zg::kToDevice, zg::kToHost}) {
    const std::int64_t bytes = now.links[link].bytes - before.links[link].bytes;
    std::printf("  %s %s (%s)", zg::name_of(link), zg::format_bytes(bytes).c_str(),
                zg::format_rate(static_cast<double>(bytes) / seconds).c_str());
  }
  std::printf("\n");
}

int run(int count, char** words) {
  enum { kTotal, kHost, kDevice, kTensor, kSteps };
  std::int64_t values[] = {4 * zg::kGiB, 256 * zg::kMiB, 64 * zg::kMiB, 64 * zg::kMiB, 4};
  const option flags[] = {{"total", 1, nullptr, kTotal},   {"host", 1, nullptr, kHost},
                          {"device", 1, nullptr, kDevice}, {"tensor", 1, nullptr, kTensor},
                          {"steps", 1, nullptr, kSteps},   {"help", 0, nullptr, 'h'},
                          {nullptr, 0, nullptr, 0}};
  for (int flag; (flag = getopt_long(count, words, "h", flags, nullptr)) != -1;) {
    if (flag == 'h') {
      std::printf(
          "store_stream [--total 4GiB] [--host 256MiB] [--device 64MiB] [--tensor 64MiB] [--steps 4] "
          "DIRECTORY...\n\nStreams tensors of --total bytes through the budgets --host and --device, and "
          "checks them.\nOne directory on each drive.\n");
      return 0;
    }
    const auto value = flag != '?' ? zg::parse_bytes(optarg) : std::nullopt;
    if (!value || *value < 1) throw zg::Error(zg::Errc::kUsage, "store_stream", "see --help");
    values[flag] = *value;
  }
  if (optind == count) throw zg::Error(zg::Errc::kUsage, "store_stream", "needs a directory on each drive");

  // A segment is what moves as a whole. Large ones are moved at the drives' full speed; but some must fit
  // into each budget at once: the one in use, those that are fetched ahead, those that are written back.
  const std::int64_t segment = std::clamp<std::int64_t>(
      std::min(values[kHost], values[kDevice]) / 16 / 4096 * 4096, 4096, 4 * zg::kMiB);
  const std::int64_t tensor = zg::round_up(values[kTensor], 4096),
                     tensors = (values[kTotal] + tensor - 1) / tensor;
  zg::StoreConfig config{.device_bytes = values[kDevice], .host_bytes = values[kHost]};
  const std::int64_t drives = count - optind;
  for (int i = optind; i < count;
       ++i)  // with several drives more than its equal part: a faster one gets more
    config.drives.push_back(
        {.path = words[i], .bytes = drives == 1 ? tensors * tensor : 2 * tensors * tensor / drives});
  const auto opened = zg::open_store(config);
  zg::TensorStore& store = opened->store();
  std::printf("%s\n%s in %lld tensors, host %s, device %s, segments of %s\n",
              opened->io()->describe().c_str(), zg::format_bytes(tensors * tensor).c_str(),
              static_cast<long long>(tensors), zg::format_bytes(config.host_bytes).c_str(),
              zg::format_bytes(config.device_bytes).c_str(), zg::format_bytes(segment).c_str());
  for (std::int64_t t = 0; t < tensors; ++t)
    store.add({.name = "tensor." + std::to_string(t), .count = tensor / 4, .segment_elements = segment / 4});

  zg::StoreStatistics before;
  for (int step = 0; step <= values[kSteps]; ++step) {  // step 0 writes the first contents
    const auto begin = zg::Clock::now();
    // All steps of a name do the same, so the store knows what comes; step 0 does something else.
    store.step_begin(step == 0 ? "fill" : "step");
    for (zg::SegmentId s = 0; s < store.table().segment_count(); ++s) {
      // A lease gives the bytes, and keeps them in place until its scope ends: keep scopes short.
      if (step > 0) check(store.acquire(s, zg::Tier::kDevice, zg::Access::kRead), s, step - 1);
      // All is written anew, so nothing need be there: kOverwrite. To change some of it: kWrite.
      write(store.acquire(s, zg::Tier::kHost, zg::Access::kOverwrite), s, step);
    }
    store.step_end();
    const zg::StoreStatistics now = store.statistics();
    print(step, zg::seconds_between(begin, zg::Clock::now()), now, before);
    before = now;
  }
  std::printf("%s", store.explain(0).substr(0, 400).c_str());  // where a tensor is, and why
  std::printf("...\npeak of host memory %s\n", zg::format_bytes(opened->host().peak()).c_str());
  return 0;
}

int main(int count, char** words) {
  try {
    return run(count, words);
  } catch (const zg::Error& e) {  // its text says where, what and how to mend it
    std::fprintf(stderr, "%s\n", e.what());
    return e.exit_code();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "store_stream: %s\n", e.what());
    return 1;
  }
}
