"""Event files for TensorBoard: records of scalars, in the format that TensorFlow writes, without it."""
import os
import socket
import struct


def _table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)
        table.append(n)
    return table


_TABLE = _table()


def _masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes(out + bytes([n]))


def _bytes(field, data):
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _record(event):
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))


class EventFile:
    """A new event file in a directory, whose records end with what was added last."""

    def __init__(self, directory, begin):
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, f"events.out.tfevents.{int(begin)}.{socket.gethostname()}")
        self._file = open(self.path, "wb")
        self._write(begin, _bytes(3, b"brain.Event:2"))

    def add(self, step, when):
        """The numbers of a flat record of one step, which ended `when` (seconds since 1970)."""
        values = b"".join(
            _bytes(1, _bytes(1, name.replace(".", "/").encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in step.items()
            if name != "step" and isinstance(value, (int, float))
        )
        self._write(when, b"\x10" + _varint(step["step"]) + _bytes(5, values))

    def _write(self, when, event):
        self._file.write(_record(b"\x09" + struct.pack("<d", when) + event))
        self._file.flush()

    def close(self):
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
