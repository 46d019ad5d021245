"""Directories in the format of the program's checkpoints (docs/checkpoint-files.md), written and read in pieces."""
import ctypes
import json
import os
import re
import secrets
import shutil
import struct
import time

from . import _core
from ._errors import IoError, UsageError

_KIND = "ziggurat checkpoint"
_DAMAGED = "the checkpoint is damaged: take another one"
_PART = 8 << 20  # bytes read at a time
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
_FILE = "rank-00000.safetensors"


def _hash(text):
    """XXH3 of bytes, as 16 digits."""
    held = ctypes.create_string_buffer(text, len(text))
    hash = _core.Hash()
    hash.update(ctypes.addressof(held), len(text))
    return hash.text()


def _bytes_at(address, count):
    return (ctypes.c_char * count).from_address(address)


class Entry:
    """A tensor of a file: its name, its type as safetensors has it, and its shape. Its elements are written in order."""

    def __init__(self, name, dtype, shape):
        self.name, self.dtype, self.shape = name, dtype, list(shape)
        self.bytes = _WIDTHS[dtype]
        for n in self.shape:
            self.bytes *= n
        self.hash, self.written = _core.Hash(), 0


def _header(entries):
    """The text before the data: its length does not depend on the hashes."""
    notes, table, at = {"format": "pt"}, {}, 0
    for e in entries:
        notes[e.name] = f"0 {e.hash.text()}"
        table[e.name] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": [at, at + e.bytes]}
        at += e.bytes
    text = json.dumps({"__metadata__": notes, **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Writer:
    """Writes one checkpoint into a directory of them; it has its name only when all of it is on the drive.

        with Writer(directory, step, entries) as w:
            w.put(entry, address, nbytes)  # entry by entry, in order
            path = w.commit(bits, config)
    """

    def __init__(self, directory, step, entries):
        os.makedirs(directory, exist_ok=True)
        number = 1 + max((int(name.split("-")[0]) for name in names_in(directory)), default=0)
        self._path = os.path.join(os.path.abspath(directory), f"{number:04}-step-{step}")
        self._number, self._step, self._entries = number, step, entries
        self._part = f"{self._path}.part-{secrets.token_hex(4)}"

    def __enter__(self):
        os.mkdir(self._part)
        self._file = open(os.path.join(self._part, _FILE), "xb")
        self._file.write(_header(self._entries))
        return self

    def __exit__(self, *error):
        self._file.close()
        if os.path.isdir(self._part):
            shutil.rmtree(self._part, ignore_errors=True)

    def put(self, entry, address, nbytes):
        """Appends bytes of `entry`, which is the one before's successor in the list."""
        if nbytes:
            self._file.write(_bytes_at(address, nbytes))
            entry.hash.update(address, nbytes)
            entry.written += nbytes

    def commit(self, run, bits, config):
        """Puts the checkpoint in place, and returns the path of its manifest."""
        short = [e.name for e in self._entries if e.written != e.bytes]
        assert not short, short
        header = _header(self._entries)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        size = os.fstat(self._file.fileno()).st_size
        manifest = {
            "kind": _KIND, "format": 1, "version": _core.version, "run": run,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "number": self._number, "step": self._step,
            "updates": self._step, "skipped": 0, "loss": None,
            "topology": {"ranks": 1, "processes": 1, "shards": 1, "zero_stage": 0}, "bits": bits,
            "config": json.dumps(config), "files": [{"name": _FILE, "bytes": size, "header_xxh3": _hash(header)}],
        }  # fmt: skip
        text = json.dumps(manifest, indent=2)[: -len("\n}")].encode()
        with open(os.path.join(self._part, "manifest.json"), "xb") as f:
            f.write(text + b',\n  "xxh3": "%s"\n}\n' % _hash(text).encode())
            f.flush()
            os.fsync(f.fileno())
        _sync(self._part)
        os.rename(self._part, self._path)
        _sync(os.path.dirname(self._path))
        return os.path.join(self._path, "manifest.json")


def names_in(directory):
    """Names of the checkpoints in a directory, the oldest first."""
    names = [n for n in os.listdir(directory) if re.fullmatch(r"\d{4,}-step-\d+", n)]
    return sorted(names, key=lambda n: [int(part) for part in n.split("-step-")])


def find(path):
    """The checkpoint's directory for its manifest, itself, or a directory of checkpoints, whose newest it is."""
    path = os.fspath(path)
    if os.path.basename(path) == "manifest.json":
        path = os.path.dirname(path)
    if not os.path.exists(os.path.join(path, "manifest.json")):
        names = names_in(path) if os.path.isdir(path) else []
        if not names:
            raise UsageError("is no checkpoint, and has none in it", path, "name what save() has returned")
        path = os.path.join(path, names[-1])
    return path


class Reader:
    """An open checkpoint: all its bytes have been compared with their hashes."""

    def __init__(self, path):
        self.path = find(path)
        self.manifest = self._read_manifest(os.path.join(self.path, "manifest.json"))
        self._entries, self._files = {}, []
        try:
            for file in self.manifest["files"]:
                self._open(os.path.join(self.path, file["name"]), file)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _read_manifest(path):
        with open(path, "rb") as f:
            text = f.read()
        tail = len(b',\n  "xxh3": "0123456789abcdef"\n}\n')
        before = text[:-tail]
        if text[-tail:] != b',\n  "xxh3": "%s"\n}\n' % _hash(before).encode():
            raise UsageError("was changed: its end is not the XXH3 of the text before", path, _DAMAGED)
        manifest = json.loads(text)
        if manifest.get("kind") != _KIND or manifest["format"] != 1:
            raise UsageError(f"has format {manifest.get('format')}, 1 expected", path,
                             "name what an optimizer of this package has saved")  # fmt: skip
        return manifest

    def _open(self, path, known):
        try:
            file = open(path, "rb")
        except OSError as e:
            raise IoError(f"cannot be opened: {e.strerror} (errno {e.errno})", path, _DAMAGED) from None
        self._files.append(file)
        size = os.fstat(file.fileno()).st_size
        if size != known["bytes"]:
            raise UsageError(f"has {size} bytes, {known['bytes']} expected", path, _DAMAGED)
        length = file.read(8)
        header = file.read(struct.unpack("<Q", length)[0])
        if _hash(length + header) != known["header_xxh3"]:
            raise UsageError("has a header with another XXH3 than its manifest says", path, _DAMAGED)
        table = json.loads(header)
        notes = table.pop("__metadata__")
        for name, entry in table.items():
            begin, end = (8 + len(header) + at for at in entry["data_offsets"])
            self._entries[name] = (file, entry["dtype"], begin, end - begin)
            self._compare(path, name, notes[name].split()[1])

    def _compare(self, path, name, wanted):
        file, _, begin, size = self._entries[name]
        hash, buffer = _core.Hash(), ctypes.create_string_buffer(min(_PART, max(size, 1)))
        for at in range(0, size, _PART):
            count = min(_PART, size - at)
            file.seek(begin + at)
            file.readinto(memoryview(buffer)[:count])
            hash.update(ctypes.addressof(buffer), count)
        if hash.text() != wanted:
            raise UsageError(f"has {name} with XXH3 {hash.text()}, {wanted} expected", path, _DAMAGED)

    def dtype(self, name):
        return self._entries[name][1]

    def nbytes(self, name):
        """Bytes of the tensor; None: there is none of that name."""
        return self._entries[name][3] if name in self._entries else None

    def read(self, name, at, address, nbytes):
        """Copies bytes [at, at + nbytes) of the tensor to an address."""
        file, _, begin, _ = self._entries[name]
        file.seek(begin + at)
        if nbytes and file.readinto(_bytes_at(address, nbytes)) != nbytes:
            raise IoError("ends too early", file.name, _DAMAGED)

    def close(self):
        for file in self._files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
