// What a command writes to stdout: none of it is lost unsaid.
#pragma once

namespace zg::cli {

// Nobody reads stdout any more, as behind "| head". The command ends at once and quietly, as usual tools do,
// with the exit code that a shell gives them. A run goes on.
struct OutputClosed {};
inline constexpr int kOutputClosed = 141;

// Brings all that was printed to stdout. Throws OutputClosed, or Error(kIo) where it cannot be written, as to
// a full disk; what is left of it is dropped then.
void flush_output();

}  // namespace zg::cli
