"""What the tests of the Python package share: packages that may be missing, and folders."""
import concurrent.futures
import importlib
import shutil
import sys
import tempfile
import time
import unittest


def need(*packages):
    """Ends the program as skipped, with a line that says why, where one of the packages cannot be imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as e:
            print(f"skipped: {package} cannot be imported ({e}); tools/python_packages.sh --torch brings it")
            sys.exit(77)


class InFolder(unittest.TestCase):
    """A test with a folder of its own, which stands for a drive."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)


def bits(tensors):
    """The bytes of torch tensors, to compare."""
    import torch

    return [t.detach().clone().contiguous().view(-1).view(torch.uint8) for t in tensors]


def same_bits(a, b):
    import torch

    a, b = bits(a), bits(b)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


class SlowWorker(concurrent.futures.ThreadPoolExecutor):
    """In place of an optimizer's worker: updates that are handed to it wait, each for a while of its own."""

    def __init__(self, seconds):
        super().__init__(1)
        self._seconds = seconds

    def submit(self, work, *args):
        super().submit(time.sleep, self._seconds)
        return super().submit(work, *args)
