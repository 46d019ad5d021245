// What a test sets, and sees, of the fake cuFile.
#pragma once

extern "C" {

struct FakeCuFile {
  // The next call of its kind fails: cuFile's error, or an errno for a transfer.
  int fail_open, fail_file, fail_transfer, fail_memory;
  long most_bytes;  // of one transfer; 0: any
  // The granule of device memory: a transfer of memory that is not registered fails if it passes the end of a
  // granule. 0: it may pass.
  long granule;
  int gather;        // a transfer waits until so many are running, for 10 seconds at most
  int nvfs_major;    // 0: not loaded
  int odd_files;     // files that only compatibility mode takes
  int allow_compat;  // as it was set; -1: it was not
  int features;
  // Open or registered now.
  int drivers, files, memories, running;
  // So far.
  int transfers, most_running;
  long largest;  // transfer
};
}
