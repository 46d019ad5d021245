// What the process may know of itself and its machine.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

// Resident memory of this process now, and at its peak (VmHWM), in bytes.
std::int64_t resident_bytes();
std::int64_t peak_resident_bytes();

// Bytes this process may still take: the smaller of free memory and what its cgroup leaves.
std::int64_t available_memory();

// SIGINT and SIGTERM set a flag; a second one ends the process at once. Call once, from main.
void install_interrupt_handler();
bool interrupted();
void request_interrupt();  // as if the signal had come; for tests

// Reads a whole small file; throws Error(kUsage) naming it when it cannot be read.
std::string read_text_file(const std::string& path, const std::string& what);
// Writes beside and renames, so that the file is either the old or the new one. Throws Error(kIo).
void write_file_atomically(const std::string& path, const std::string& content);

}  // namespace zg
