// An emulation of CUDA C++ on the CPU, as far as the kernels of kernels/cuda use it: the same sources compile
// with the host's compiler, so that their logic is tested without a GPU.
//
// Every thread of a block is a fiber, and all fibers of a block run on one host thread. They switch only at
// barriers and warp collectives, each time in a random order drawn from a seed: code that lacks a barrier
// gives different results for different seeds. Dynamic shared memory is filled with NaN patterns when a block
// begins. The emulation ends the process, with a message, at a barrier that some threads can never reach, at
// a collective that some lanes skip or reach with another mask, and for blocks that are too large for a GPU.
//
// Not modelled: time, caches, memory order between blocks, and lanes that run simultaneously between
// collectives. Sums and products follow IEEE and are never contracted to FMA; the approximate functions
// (__expf) are exact.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// A copy for each host thread, and so for each running block.
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
#define ZG_EMULATED_VECTOR(type, base)                                    \
  struct alignas(2 * sizeof(base)) type##2 {                              \
    base x, y;                                                            \
  };                                                                      \
  struct alignas(4 * sizeof(base) < 16 ? 4 * sizeof(base) : 16) type##4 { \
    base x, y, z, w;                                                      \
  };                                                                      \
  inline type##2 make_##type##2(base x, base y) {                         \
    return {x, y};                                                        \
  }                                                                       \
  inline type##4 make_##type##4(base x, base y, base z, base w) {         \
    return {x, y, z, w};                                                  \
  }
ZG_EMULATED_VECTOR(float, float)
ZG_EMULATED_VECTOR(int, int)
ZG_EMULATED_VECTOR(uint, unsigned)
#undef ZG_EMULATED_VECTOR

namespace zg::emulation {

struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
const Place& place();  // the place of the running fiber
void barrier();        // waits for all threads of the block
// A collective of the lanes of `mask`, all of which must call it with that mask. Each contributes a value;
// the result is the value of lane `from`.
std::uint64_t exchange(unsigned mask, std::uint64_t value, int from);
// A collective: each lane contributes `bytes` bytes (at most kMaxGiven). Until its next collective it may
// read the contributions of all lanes, which are kMaxGiven bytes apart.
inline constexpr std::size_t kMaxGiven = 64;
const void* gather(unsigned mask, const void* value, std::size_t bytes);
unsigned vote(unsigned mask, bool predicate);  // a collective: a bit for each lane
void* dynamic_shared();
int lane();
[[noreturn]] void trap();  // ends the process
// Ends the process with the message `rule` unless `kept`.
void require(bool kept, const char* rule);

// Asynchronous copies of a thread, in groups (cp.async). Whether a copy is carried out at once, or when the
// thread waits for its group, is random: a missing wait, or a copy to memory that others still read, gives
// different results for different seeds. A null `from` copies zeros. Copies that the thread never waits for
// are lost.
void start_copy(void* to, const void* from, std::size_t bytes);
void commit_copies();
void wait_copies(std::size_t left);  // until at most the latest `left` groups are in flight
// Ends the process if the address is not aligned to the size of the access, where a GPU would fault.
void check_access(const void* address, std::size_t bytes);

// Runs the kernel over the grid in the calling thread, the blocks in a random order.
void run(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes,
         const std::function<void()>& kernel);
// Sets the seed of all random orders, for tests. Any thread.
void set_seed(std::uint64_t seed);
// The shared memory that a block can have; run() ends the process for more. Tests lower it to check kernels
// for smaller GPUs.
inline constexpr std::size_t kMostShared = 227 * 1024;  // sm_90 and sm_100; sm_80: 163 KiB, sm_86 and 89: 99
std::size_t most_shared();
void set_most_shared(std::size_t bytes);
// How often the latest run switched to a fiber. For tests of the emulation.
std::uint64_t switches();

// The base of emulated streams.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void enqueue(std::function<void()> work) = 0;
};
// With a null stream the work runs at once.
inline void enqueue(void* stream, std::function<void()> work) {
  stream == nullptr ? work() : static_cast<Queue*>(stream)->enqueue(std::move(work));
}

template <class T>
T shuffle(unsigned mask, T value, int from, int width) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  const int base = lane() / width * width;
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, from < base || from >= base + width ? lane() : from);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace zg::emulation

#define threadIdx (::zg::emulation::place().thread)
#define blockIdx (::zg::emulation::place().block)
#define blockDim (::zg::emulation::place().block_size)
#define gridDim (::zg::emulation::place().grid_size)

inline void __syncthreads() {
  zg::emulation::barrier();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  zg::emulation::vote(mask, true);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return zg::emulation::shuffle(mask, value, zg::emulation::lane() / width * width + from % width, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return zg::emulation::shuffle(mask, value, zg::emulation::lane() ^ bits, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return zg::emulation::shuffle(mask, value, zg::emulation::lane() + static_cast<int>(by), width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return zg::emulation::shuffle(mask, value, zg::emulation::lane() - static_cast<int>(by), width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return zg::emulation::vote(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return zg::emulation::vote(mask, predicate != 0) != 0;
}
[[noreturn]] inline void __trap() {
  zg::emulation::trap();
}

// A plain addition suffices, since blocks run one after the other.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}

inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((std::uint64_t{a} * b) >> 32);
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline double __dsqrt_rn(double a) {
  return std::sqrt(a);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __expf(float x) {
  return std::exp(x);
}
// The reduction is exact, since fmod() is.
inline void sincospi(double x, double* sine, double* cosine) {
  const double angle = std::fmod(x, 2.0) * 3.14159265358979323846;
  *sine = std::sin(angle);
  *cosine = std::cos(angle);
}
inline void sincospif(float x, float* sine, float* cosine) {
  double s = 0, c = 0;
  sincospi(static_cast<double>(x), &s, &c);
  *sine = static_cast<float>(s);
  *cosine = static_cast<float>(c);
}
