// The system calls behind a host arena: addresses are reserved in large regions, and pages are taken and
// given back within them. Threads: any, on disjoint ranges.
#pragma once
#include <cstdint>
#include <string>

namespace zg::pages {

inline constexpr std::int64_t kPage = 4096;
// The size and alignment of huge pages.
inline constexpr std::int64_t kUnit = std::int64_t{2} << 20;

// Reserves addresses without pages, aligned to kUnit; 0 if the system refuses. bytes: a multiple of kUnit.
std::int64_t reserve(std::int64_t bytes);
void unreserve(std::int64_t begin, std::int64_t bytes);

// Pages taken in this range later come from this NUMA node, or from others when it has none left. (With a
// strict binding the process would be killed instead.) Returns an errno, 0 for success.
int prefer_node(std::int64_t begin, std::int64_t bytes, int node);

// Sets whether the kernel may use huge pages in this range, when pages are taken or later in the background.
// After reserve() it may not: a huge page could exceed the budget.
void allow_huge(std::int64_t begin, std::int64_t bytes, bool huge);
// Takes pages and touches them, so that no access faults later. All compute threads take part if there are
// many pages, since one thread clears only a few GB/s. Returns an errno, 0 for success; after an error some
// pages may have been taken.
int take(std::int64_t begin, std::int64_t bytes);
// Gives pages back; the addresses stay reserved. `locked` pages are unlocked first.
void give_back(std::int64_t begin, std::int64_t bytes, bool locked);
// Moves pages to other addresses, but not their content: a driver that has registered `from` still holds the
// pages under the old addresses, and does not notice. The addresses at `from` stay reserved. `locked` pages
// stay locked. Returns an errno, 0 for success; after an error neither place has pages. (Linux 5.7 or newer;
// EINVAL before.)
int move(std::int64_t from, std::int64_t to, std::int64_t bytes, bool locked);
// Locks pages in memory (mlock). Returns an errno.
int lock(std::int64_t begin, std::int64_t bytes);

// The kernel's account of the pages between these addresses, in bytes.
struct Counts {
  std::int64_t resident = 0, huge = 0, locked = 0;
};
Counts& operator+=(Counts& a, const Counts& b);
Counts count(std::int64_t begin, std::int64_t bytes);

}  // namespace zg::pages
