// This process and its machine: memory, interruption, small files. Any thread may call these functions.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

// Resident memory of this process, now and at its peak (VmHWM), in bytes.
std::int64_t resident_bytes();
std::int64_t peak_resident_bytes();

// Bytes this process may still take: the smaller of free memory and what its cgroup leaves.
std::int64_t available_memory();

// From now on SIGINT and SIGTERM set the flag that interrupted() reads; a second signal ends the process at
// once, with exit code 130. Call once, from main.
void install_interrupt_handler();
bool interrupted();
void request_interrupt();  // sets the flag as the first signal does; for tests

}  // namespace zg
