"""Safetensors files from which offload() reads parameters, straight into the memory that the store leases."""
import ctypes
import json
import os
import struct

import torch

from ._errors import IoError, UsageError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
_LARGEST_HEADER = 100 << 20
_PART = 8 << 20  # bytes converted at a time, where a file has another type


def _paths(files):
    """The files of a path or of several; of a directory all that end in .safetensors."""
    files = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    out = []
    for path in map(os.fspath, files):
        if os.path.isdir(path):
            found = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
            if not found:
                raise UsageError("has no file that ends in .safetensors", path, "name the files, or their directory")
            out += [os.path.join(path, n) for n in found]
        else:
            out.append(path)
    return out


class Files:
    """The tensors of safetensors files, by name. A context manager."""

    def __init__(self, files):
        self._entries, self._open = {}, []
        try:
            for path in _paths(files):
                self._add(path)
        except BaseException:
            self.__exit__()
            raise

    def _add(self, path):
        try:
            file = open(path, "rb", buffering=0)
        except OSError as e:
            raise IoError(f"cannot be opened: {e.strerror} (errno {e.errno})", path, "name safetensors files") from None
        self._open.append(file)
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _LARGEST_HEADER):
            raise UsageError("is no safetensors file: its header does not fit", path, "name safetensors files")
        try:
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            for name, entry in table.items():
                begin, end = entry["data_offsets"]
                dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
                if not 0 <= begin <= end <= size - 8 - length or end - begin != shape.numel() * dtype.itemsize:
                    raise ValueError(f'"{name}" has bytes {begin} to {end} for {entry["dtype"]}{list(shape)}')
                self._entries[name] = (file, path, dtype, shape, 8 + length + begin)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
            raise UsageError(f"is no safetensors file that can be read: {e}", path, "name safetensors files") from None

    def has(self, names):
        return any(name in self._entries for name in names)

    def check(self, places):
        """Raises UsageError for the first parameter (places: parameter -> its names) that no file has, or not so."""
        for p, names in places.items():
            name = next((n for n in names if n in self._entries), None)
            if name is None:
                first = next(iter(self._entries), "nothing")
                raise UsageError("is in none of the files", f'parameter "{names[0]}"',
                                 f'they have {len(self._entries)} tensors, the first is "{first}"')  # fmt: skip
            _, path, _, shape, _ = self._entries[name]
            if shape != p.shape:
                raise UsageError(f"has {list(shape)}, and the model {list(p.shape)}", f'{path}: "{name}"',
                                 "is it of this model?")  # fmt: skip

    def read(self, names, address, like):
        """Reads a tensor into memory at `address`, which is contiguous and of the type of `like`."""
        file, path, dtype, shape, at = self._entries[next(n for n in names if n in self._entries)]
        total = shape.numel()
        if dtype == like.dtype:
            return self._fill(file, path, at, address, total * dtype.itemsize)
        for first in range(0, total, _PART // 8):
            count = min(_PART // 8, total - first)
            values = torch.empty(count, dtype=dtype)
            self._fill(file, path, at + first * dtype.itemsize, values.data_ptr(), values.nbytes)
            values = values.to(like.dtype)
            ctypes.memmove(address + first * like.dtype.itemsize, values.data_ptr(), values.nbytes)

    @staticmethod
    def _fill(file, path, at, address, nbytes):
        done, view = 0, memoryview((ctypes.c_char * nbytes).from_address(address)) if nbytes else b""
        while done < nbytes:
            got = os.preadv(file.fileno(), [view[done : done + (1 << 30)]], at + done)
            if got == 0:
                raise IoError("ends too early", path, "copy the file again")
            done += got

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for file in self._open:
            file.close()
