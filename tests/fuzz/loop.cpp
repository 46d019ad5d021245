#include "fuzz/loop.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <typeinfo>

#include "support/files.hpp"
#include "support/seed.hpp"
#include "ziggurat/base/error.hpp"
#include "ziggurat/base/log.hpp"
#include "ziggurat/base/philox.hpp"
#include "ziggurat/base/printable.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
// The bound on memory, which for others is RLIMIT_AS.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=1024:detect_stack_use_after_return=1:detect_leaks=1";
}
#endif

namespace zg::fuzz {
namespace {

namespace fs = std::filesystem;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr std::uint64_t kUsualInputs = 400;
constexpr int kSeconds = kSanitized ? 30 : 5;        // of the processor, for one input
constexpr int kWaitSeconds = kSanitized ? 300 : 60;  // of the clock: for what waits, not computes
constexpr std::uint64_t kMemory = std::uint64_t{1} << 30;
constexpr std::size_t kLongestMessage = 25'000;
constexpr int kMostFailures = 3;
constexpr int kFaultFound = 99;  // exit code

// What the process of the loop tells the test.
struct Shared {
  std::uint64_t index;  // of the input that it is at
  std::uint64_t taken, refused;
  std::size_t bytes;  // of the input
  char message[1 << 14];
  char input[16 << 20];
};

class SharedMemory {
 public:
  SharedMemory() {
    void* const memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error(Errc::kMemory, "the memory of a fuzzer", errno_text(errno));
    shared_ = static_cast<Shared*>(memory);
  }
  ~SharedMemory() { ::munmap(shared_, sizeof(Shared)); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  Shared* operator->() const { return shared_; }
  Shared& operator*() const { return *shared_; }

 private:
  Shared* shared_;
};

void store(const Case& input, Shared& shared) {
  shared.bytes = 0;
  for (const File& file : input) {
    const std::string head = fmt::format("{}\n{}\n", file.name, file.content.size());
    if (shared.bytes + head.size() + file.content.size() > sizeof shared.input)
      throw std::logic_error("an input of the fuzzer is too large");
    std::memcpy(shared.input + shared.bytes, head.data(), head.size());
    shared.bytes += head.size();
    std::memcpy(shared.input + shared.bytes, file.content.data(), file.content.size());
    shared.bytes += file.content.size();
  }
}

Case loaded(const Shared& shared) {
  Case input;
  for (std::string_view rest(shared.input, shared.bytes); !rest.empty();) {
    const std::size_t first = rest.find('\n'), second = rest.find('\n', first + 1);
    const std::size_t size = std::stoull(std::string(rest.substr(first + 1, second - first - 1)));
    input.push_back({std::string(rest.substr(0, first)), std::string(rest.substr(second + 1, size))});
    rest.remove_prefix(second + 1 + size);
  }
  return input;
}

// On a file system in memory, where there is one.
fs::path parent_of_directories() {
  return ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
}

// The files of the inputs, of which those that have changed are written.
class Directory {
 public:
  explicit Directory(std::string path) : path_(std::move(path)) {}
  void put(const Case& input, bool anew) {
    if (anew) {
      for (const auto& entry : fs::directory_iterator(path_)) fs::remove_all(entry.path());
      written_.clear();
    }
    for (const File& file : input) {
      const auto found = written_.find(file.name);
      if (found != written_.end() && found->second == file.content) continue;
      test::write_file(path_ + "/" + file.name, file.content);
      written_[file.name] = file.content;
    }
  }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  std::map<std::string, std::string> written_;
};

Case input_number(const Parser& parser, std::uint64_t seed, std::uint64_t index) {
  // The first inputs are the valid ones.
  if (index < parser.corpus.size()) return parser.corpus[index];
  const Philox4 bits = NamedRandom(seed, "fuzz." + parser.name).block(index);
  Random random(std::uint64_t{bits[0]} << 32 | bits[1]);
  Case input = random.of(parser.corpus);
  mutate(parser, input, random);
  if (parser.seal && random.chance(90)) parser.seal(input, random);
  return input;
}

// What is wrong with an Error, or with its absence; empty: nothing.
std::string fault_of(const Error& e) {
  const std::string text = e.what();
  if (e.exit_code() != 2) return fmt::format("an error of exit code {}: {}", e.exit_code(), text);
  if (e.where().empty() || e.message().empty()) return "an error without place or cause: " + text;
  if (text.size() > kLongestMessage) return fmt::format("an error of {} bytes", text.size());
  if (text != printable(text)) return "an error with control characters: " + printable(text);
  return {};
}

std::string fault_in(const Parser& parser, const Case& input, const std::string& directory, bool& taken) {
  taken = false;
  try {
    parser.use(input, directory);
    taken = true;
    return {};
  } catch (const Error& e) {
    return fault_of(e);
  } catch (const Wrong& e) {
    return std::string("what was taken is wrong: ") + e.what();
  } catch (const std::exception& e) {
    return fmt::format("an exception that is no Error, {}: {}", typeid(e).name(), e.what());
  }
}

void limit_this_process() {
  const rlimit none{0, 0};
  (void)::setrlimit(RLIMIT_CORE, &none);
  if (kSanitized) return;  // their shadow memory is terabytes
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const std::uint64_t most = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + kMemory;
  const rlimit limit{most, most};
  (void)::setrlimit(RLIMIT_AS, &limit);
}

void start_clock() {
  const itimerval limit{{0, 0}, {kSeconds, 0}};
  (void)::setitimer(ITIMER_PROF, &limit, nullptr);
  (void)::alarm(kWaitSeconds);
}

// Inputs [first, end), in this process.
[[noreturn]] void run_inputs(const Parser& parser, std::uint64_t seed, std::uint64_t first, std::uint64_t end,
                             Shared& shared) {
  limit_this_process();
  Directory directory(fs::current_path().string());
  const auto found = [&](const std::string& fault) {
    const std::size_t n = std::min(fault.size(), sizeof shared.message - 1);
    std::memcpy(shared.message, fault.data(), n);
    shared.message[n] = '\0';
    ::_exit(kFaultFound);
  };
  for (std::uint64_t i = first; i < end; ++i) {
    const Case input = input_number(parser, seed, i);
    shared.index = i;
    store(input, shared);
    if (parser.on_disk) directory.put(input, parser.writes);
    start_clock();
    bool taken = false;
    const std::string fault = fault_in(parser, input, directory.path(), taken);
    if (!fault.empty()) found(fault);
    if (i < parser.corpus.size() && !taken) found("a valid input is refused");
    ++(taken ? shared.taken : shared.refused);
  }
  shared.index = end;
#if defined(__SANITIZE_ADDRESS__)
  (void)::alarm(0);
  const itimerval none{};
  (void)::setitimer(ITIMER_PROF, &none, nullptr);
  if (__lsan_do_recoverable_leak_check() != 0) found("memory was lost: see above");
#endif
  ::_exit(0);
}

std::string tail_of(const std::string& text, std::size_t most) {
  return text.size() <= most ? text : "..." + text.substr(text.size() - most);
}

std::string end_of_process(int status, const Shared& shared) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    if (signal == SIGPROF) return fmt::format("takes more than {} s of the processor", kSeconds);
    if (signal == SIGALRM) return fmt::format("waits for more than {} s", kWaitSeconds);
    return fmt::format("ended the process by signal {} ({})", signal, ::strsignal(signal));
  }
  if (WEXITSTATUS(status) == kFaultFound) return shared.message;
  return fmt::format("ended the process with exit code {}", WEXITSTATUS(status));
}

void report(const Parser& parser, std::uint64_t seed, const Shared& shared, const std::string& fault,
            const std::string& said) {
  const fs::path kept =
      fs::temp_directory_path() / fmt::format("zg-fuzz-{}-{}-{}", parser.name, seed, shared.index);
  for (const File& file : loaded(shared)) test::write_file(kept / file.name, file.content);
  ADD_FAILURE() << parser.name << ", input " << shared.index << ": " << fault << "\n"
                << tail_of(said, 6000) << "\nThe input is kept in " << kept.string()
                << ". Again, alone: ZG_FUZZ_CASE=" << kept.string() << "; all up to it: ZG_TEST_SEED=" << seed
                << " ZG_TEST_INPUTS=" << shared.index + 1;
}

void run_kept_case(const Parser& parser, const std::string& from) {
  Case input = parser.corpus.front();
  for (File& file : input) {
    if (fs::exists(from + "/" + file.name)) file.content = test::read_file(from + "/" + file.name);
  }
  const test::TempDir dir(parent_of_directories());
  fs::current_path(dir.path());
  Directory(dir.path()).put(input, false);
  bool taken = false;
  const std::string fault = fault_in(parser, input, dir.path(), taken);
  EXPECT_EQ(fault, "") << from;
  fmt::print("{}: {}\n", from, taken ? "taken" : "refused");
}

}  // namespace

std::string& content_of(Case& input, const std::string& name) {
  const auto found = std::find_if(input.begin(), input.end(), [&](const File& f) { return f.name == name; });
  if (found == input.end()) throw std::logic_error("no file " + name);
  return found->content;
}
const std::string& content_of(const Case& input, const std::string& name) {
  return content_of(const_cast<Case&>(input), name);
}

void mutate(const Parser& parser, Case& input, Random& random) {
  const std::string name = parser.changed.empty() ? random.of(input).name : random.of(parser.changed);
  const Case& other_case = random.of(parser.corpus);
  const auto other =
      std::find_if(other_case.begin(), other_case.end(), [&](const File& f) { return f.name == name; });
  const auto own = std::find_if(input.begin(), input.end(), [&](const File& f) { return f.name == name; });
  if (own == input.end()) return mutate_bytes(input.front().content, input.front().content, random);
  const std::string beside = other == other_case.end() ? own->content : other->content;
  if (name.ends_with(".json") || name.ends_with(".pins")) {
    mutate_json_text(own->content, beside, random);
  } else if (name.ends_with(".safetensors")) {
    mutate_safetensors(own->content, beside, random);
  } else {
    mutate_bytes(own->content, beside, random);
  }
}

void fuzz(const Parser& parser) {
  if (const char* const from = std::getenv("ZG_FUZZ_CASE")) return run_kept_case(parser, from);
  const std::uint64_t seed = test::test_seed(20261127), end = test::inputs_asked(kUsualInputs);
  const auto begin = std::chrono::steady_clock::now();
  const SharedMemory shared;
  int failures = 0;
  for (std::uint64_t next = 0; next < end && failures < kMostFailures;) {
    const test::TempDir dir(parent_of_directories()), said(parent_of_directories());
    const std::string words = said / "stderr";
    shared->index = next;
    std::fflush(nullptr);
    const pid_t process = ::fork();
    ASSERT_GE(process, 0) << errno_text(errno);
    if (process == 0) {
      if (std::freopen(words.c_str(), "w", stderr) == nullptr || ::chdir(dir.path().c_str()) != 0) ::_exit(1);
      log::set_level(log::Level::kError);
      run_inputs(parser, seed, next, end, *shared);
    }
    int status = 0;
    while (::waitpid(process, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) break;
    ++failures;
    report(parser, seed, *shared, end_of_process(status, *shared), test::read_file(words));
    next = shared->index + 1;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print("{}: {} inputs taken, {} refused, in {:.1f} s\n", parser.name, shared->taken, shared->refused,
             seconds);
  if (end < parser.corpus.size() + 100 || failures > 0) return;
  EXPECT_GT(shared->taken, parser.corpus.size()) << "no changed input was taken: nothing behind it is tested";
  if (!parser.takes_all) {
    EXPECT_GT(shared->refused, 0u) << "no input was refused";
  }
}

}  // namespace zg::fuzz
