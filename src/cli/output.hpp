// Output of a command to stdout, where no write error goes unnoticed.
#pragma once

namespace zg::cli {

// Thrown when nobody reads stdout any more, as with "| head". The command then ends at once and quietly, with
// the exit code that a shell reports for other tools in this case. A training run goes on.
struct OutputClosed {};
inline constexpr int kOutputClosed = 141;

// If stdout is no terminal, makes it write in large pieces, so that flush_output() mostly knows why a write
// has failed. Call first in main.
void buffer_output();

// Flushes all printed text to stdout. Throws OutputClosed, or Error(kIo) if it cannot be written, for example
// to a full disk; the unwritten rest is then dropped.
void flush_output();

}  // namespace zg::cli
