// This process and its machine: memory, interruption, standard streams. Any thread may call these functions.
#pragma once
#include <cstdint>
#include <string>

namespace zg {

// Resident memory of this process, current and peak (VmHWM), in bytes.
std::int64_t resident_bytes();
std::int64_t peak_resident_bytes();

// Bytes this process may still take: the smaller of the free memory and the memory that its cgroup leaves.
std::int64_t available_memory();

// Opens /dev/null in place of each of stdin, stdout and stderr that is closed, so that no file of the run
// gets its descriptor number and receives its text. Writes to a stdout that was closed still fail. Call first
// in main.
void open_standard_streams();

// Makes SIGINT and SIGTERM set the flag that interrupted() reads; a second one ends the process at once, with
// exit code 130. SIGHUP (the terminal is gone), unless it is ignored as under nohup, and SIGXCPU (the limit
// on processor time) only set the flag, however often they come. SIGPIPE and SIGXFSZ do nothing; the write
// that caused them fails. Programs that this one starts get the system's default handlers. Call once, from
// main.
void install_interrupt_handler();
bool interrupted();
void request_interrupt();  // sets the flag, like the first signal

}  // namespace zg
