"""The log of a training run: log.jsonl as columns."""
import json
import os
import time

from ._errors import UsageError
from ._tensorboard import write_events


def _flat(record, prefix=""):
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Log:
    """The steps of a run, by column: log["loss"], log["bytes.nvme_read"], ... A step without a value has None.

    columns  their names, those of log.jsonl; what is nested there is joined by dots
    steps    the records as they are in the file
    """

    def __init__(self, steps, path=None):
        self.steps, self._path = steps, path
        self._flat = [dict(_flat(s)) for s in steps]
        self.columns = list(dict.fromkeys(name for s in self._flat for name in s))

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, name):
        if name not in self.columns:
            raise UsageError("is no column", name, "there are " + ", ".join(self.columns))
        return [s.get(name) for s in self._flat]

    def array(self, name):
        """The column as a NumPy array of float64; NaN where a step has no value."""
        import numpy as np

        return np.array([float("nan") if v is None else v for v in self[name]], dtype=float)

    def to_pandas(self):
        """All columns as a pandas.DataFrame, by step."""
        import pandas

        return pandas.DataFrame(self._flat, columns=self.columns).set_index("step")

    def to_tensorboard(self, directory=None):
        """Writes an event file for TensorBoard, beside the log or into `directory`, and returns its path."""
        if directory is None and self._path is None:
            raise UsageError("is not given", "directory", "this log was not read from a file")
        now = time.time() if self._path is None else os.path.getmtime(self._path)
        return write_events(directory or os.path.dirname(self._path) or ".", self._flat, now)

    def phases(self):
        """Milliseconds of each phase of a step, and of stalls, as means over the steps: {name: ms}."""
        return self._means("phase_ms.")

    def stalls(self):
        """Milliseconds that a step waited, by cause, as means over the steps."""
        return self._means("stall_ms.")

    def links(self):
        """For each link its bytes per step, as means over the steps."""
        return self._means("bytes.")

    def _means(self, prefix):
        names = [c for c in self.columns if c.startswith(prefix)]
        return {c[len(prefix):]: sum(v or 0 for v in self[c]) / max(1, len(self)) for c in names}  # fmt: skip

    def plot(self, *names, axes=None):
        """Plots columns over the steps with matplotlib, one below the other; returns the figure."""
        import matplotlib.pyplot as plt

        names = names or ("loss", "tokens_per_s")
        if axes is None:
            _, axes = plt.subplots(len(names), sharex=True, squeeze=False)
            axes = axes[:, 0]
        for name, axis in zip(names, axes):
            axis.plot(self["step"], self.array(name))
            axis.set_ylabel(name)
        axes[-1].set_xlabel("step")
        return axes[0].figure

    def __repr__(self):
        if not self.steps:
            return "<Log, no steps>"
        last = self.steps[-1]
        return f"<Log of {len(self)} steps, the last: step {last['step']}, loss {last['loss']}>"


def _lines(path):
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.endswith("\n"):
                return  # it is being written
            try:
                yield json.loads(line)
            except ValueError:
                raise UsageError("is no record of a step", f"{path}, line {number}", "is it a log.jsonl?") from None


def read_log(path, follow=False, every_seconds=1.0):
    """The log of a run: `path` is its output.dir, or the file. A Log.

    follow  returns an iterator instead, which yields each record as the run writes it, and never ends by itself
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        path = os.path.join(path, "log.jsonl")
    if not os.path.isfile(path):
        raise UsageError("is not there", path, "name the output.dir of a run, or its log.jsonl")
    return _follow(path, every_seconds) if follow else Log(list(_lines(path)), path)


def _follow(path, every_seconds):
    done = 0
    while True:
        for number, record in enumerate(_lines(path)):
            if number >= done:
                done += 1
                yield record
        time.sleep(every_seconds)
