// The system calls behind a host arena: addresses are reserved in large regions, pages come and go within
// them. Threads: any, on ranges of their own.
#pragma once
#include <cstdint>
#include <string>

namespace zg::pages {

inline constexpr std::int64_t kPage = 4096;
// Huge pages are got for whole aligned units only.
inline constexpr std::int64_t kUnit = std::int64_t{2} << 20;

// Addresses without pages, aligned to kUnit; 0: the system refuses them. A multiple of kUnit bytes.
std::int64_t reserve(std::int64_t bytes);
void unreserve(std::int64_t begin, std::int64_t bytes);

// Pages taken here later come from this node, or from others where it has none left. (Bound strictly, the
// process would be killed then.) Returns an errno.
int prefer_node(std::int64_t begin, std::int64_t bytes, int node);

// Whether pages taken here may be huge, now or by the kernel's own doing. Reserved addresses begin without: a
// huge page would reach over the end of what is wanted.
void allow_huge(std::int64_t begin, std::int64_t bytes, bool huge);
// Takes pages, so that no access faults. Returns an errno.
int take(std::int64_t begin, std::int64_t bytes);
// Gives them back; the addresses stay reserved. Locked ones are unlocked first.
void give_back(std::int64_t begin, std::int64_t bytes, bool locked);
// Keeps pages in memory. Returns an errno.
int lock(std::int64_t begin, std::int64_t bytes);

// What the kernel says of the pages between these addresses.
struct Counts {
  std::int64_t resident = 0, huge = 0, locked = 0;
};
Counts& operator+=(Counts& a, const Counts& b);
Counts count(std::int64_t begin, std::int64_t bytes);

}  // namespace zg::pages
