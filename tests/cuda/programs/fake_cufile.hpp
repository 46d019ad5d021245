// What a test sets, and sees, of the fake cuFile.
#pragma once

extern "C" {

struct FakeCuFile {
  // The next call of its kind fails: cuFile's error, or an errno for a transfer.
  int fail_open, fail_file, fail_transfer;
  long most_bytes;  // of one transfer; 0: any
  long granule;     // of device memory: a transfer that passes the end of one fails; 0: they may
  int nvfs_major;   // 0: not loaded
  int odd_files;    // files that only compatibility mode takes
  int allow_compat;  // as it was set; -1: it was not
  int features;
  // Open or registered now.
  int drivers, files;
  int transfers;  // so far
};
}
