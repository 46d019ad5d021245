"""The errors of this package; the C++ library's errors become these."""
import re


class Error(RuntimeError):
    """Something failed. `place` says where (a file, an argument, a segment), `hint` how to mend it.

    code     "usage", "io", "memory", "device", "comm", "numeric", "interrupted" or "fork"
    message  what was found there, without place and hint
    """

    code = "bug"

    def __init__(self, message="", place="", hint=""):
        self.message, self.place, self.hint = message, place, hint
        self.args = (str(self),)

    def __str__(self):
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def __reduce__(self):
        return type(self), (self.message, self.place, self.hint)


class UsageError(Error, ValueError):
    """An argument, or the order of calls, is wrong."""

    code = "usage"


class IoError(Error, OSError):
    """A drive or the operating system failed, or a checksum was wrong.

    After a failed transfer a store has failed for good. `errno` is the system's number, or None where it gave none;
    `path` is the file or drive.
    """

    code = "io"

    def __init__(self, message="", place="", hint=""):
        Error.__init__(self, message, place, hint)
        found = re.search(r"\(errno (\d+)\)", f"{message} {place}")
        self.errno = int(found[1]) if found else None
        self.path = place


class MemoryLimitError(Error, MemoryError):
    """A budget, or the machine's memory, is too small."""

    code = "memory"


class DeviceError(Error):
    """A device failed, or another rank."""

    code = "device"


class NumericError(Error, ArithmeticError):
    """A number that should be finite is not."""

    code = "numeric"


class Interrupted(Error):
    """A wait ended because the user asked to stop. Ctrl-C gives KeyboardInterrupt instead."""

    code = "interrupted"


class ForkError(Error):
    """A store, lease, pin or optimizer was used in a forked child, which has none of the library's threads."""

    code = "fork"


_CLASSES = {
    "usage": UsageError,
    "io": IoError,
    "memory": MemoryLimitError,
    "device": DeviceError,
    "comm": DeviceError,
    "numeric": NumericError,
    "interrupted": Interrupted,
    "fork": ForkError,
}


def make(code, place, message, hint):
    """The error of this package for an error of the C++ library."""
    error = _CLASSES.get(code, Error)(message, place, hint)
    error.code = code
    return error
