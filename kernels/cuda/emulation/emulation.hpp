// CUDA C++ on the processor: what the kernels of kernels/cuda use of the language, so that the very same
// sources compile with the host's compiler and their logic is tested where there is no GPU.
//
// Every thread of a block is a fiber, and all of a block run on one thread of the machine. They change only
// at barriers and warp collectives, in an order that is drawn anew each time from a seed: code that lacks a
// barrier gives other results for other seeds. Dynamic shared memory holds NaN patterns when a block begins.
// A barrier that some threads can never reach, a collective that lanes leave out or come to with another
// mask, and blocks that are larger than a GPU's are reported, and end the process.
//
// Not modelled: time, caches, memory order between blocks, and what lanes do between collectives at the same
// moment. Sums and products are IEEE's, never contracted; the approximate functions (__expf) are exact ones.
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
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// One copy for each thread of the machine, and so for each block that runs.
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
ZG_EMULATED_VECTOR(double, double)
ZG_EMULATED_VECTOR(int, int)
ZG_EMULATED_VECTOR(uint, unsigned)
ZG_EMULATED_VECTOR(ushort, unsigned short)
ZG_EMULATED_VECTOR(uchar, unsigned char)
#undef ZG_EMULATED_VECTOR

namespace zg::emulation {

struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
const Place& place();                       // of the fiber that runs
void barrier();                             // of the block
int barrier_vote(int predicate, int kind);  // 0: count, 1: and, 2: or
// Every lane of `mask` gives 8 bytes and gets what `from` gave; all of them must come, with the same mask.
std::uint64_t exchange(unsigned mask, std::uint64_t value, int from);
// Every lane of `mask` gives so many bytes (kMostGiven at most) and sees what all of them gave, lane by lane
// kMostGiven bytes apart, until its next collective.
inline constexpr std::size_t kMostGiven = 64;
const void* gather(unsigned mask, const void* value, std::size_t bytes);
unsigned vote(unsigned mask, bool predicate);  // a bit for each lane
void* dynamic_shared();
int lane();
[[noreturn]] void trap();  // ends the process
// Ends the process, and says which rule it was, unless it is kept.
void require(bool kept, const char* rule);

// Copies that a thread starts and waits for later, in groups (cp.async). Whether one is carried out at once,
// or when the thread waits for its group, is drawn: a wait that is missing, and a copy to what others still
// read, give other results for other seeds. From null: zeros. Copies that nobody waits for are lost.
void start_copy(void* to, const void* from, std::size_t bytes);
void commit_copies();
void wait_copies(std::size_t left);  // until at most so many groups are left, the latest
void check_access(const void* address, std::size_t bytes);  // that it is aligned, as a GPU would

// Runs the kernel over the grid, in this thread, blocks in a drawn order.
void run(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes,
         const std::function<void()>& kernel);
// Of orders; other seeds, other orders. For tests. From any thread.
void set_seed(std::uint64_t seed);
// As of the latest run: fibers that were switched to. For tests of the emulation.
std::uint64_t switches();

// Work of an emulated stream; null: it runs at once. Whoever makes such streams derives from this.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void enqueue(std::function<void()> work) = 0;
};
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
inline constexpr int warpSize = 32;

inline void __syncthreads() {
  zg::emulation::barrier();
}
inline int __syncthreads_count(int p) {
  return zg::emulation::barrier_vote(p, 0);
}
inline int __syncthreads_and(int p) {
  return zg::emulation::barrier_vote(p, 1);
}
inline int __syncthreads_or(int p) {
  return zg::emulation::barrier_vote(p, 2);
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
inline int __all_sync(unsigned mask, int predicate) {
  return zg::emulation::vote(mask, predicate != 0) == mask;
}
[[noreturn]] inline void __trap() {
  zg::emulation::trap();
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Blocks run one after the other.
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  const unsigned before = *at;
  *at = before >= most ? 0 : before + 1;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (before < value) *at = value;
  return before;
}
template <class T>
T atomicCAS(T* at, T expected, T value) {
  const T before = *at;
  if (before == expected) *at = value;
  return before;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
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
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((std::uint64_t{a} * b) >> 32);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __dsqrt_rn(double a) {
  return std::sqrt(a);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1 / a;
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __log2f(float x) {
  return std::log2(x);
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1 / std::sqrt(x);
}
// The remainder is exact.
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
