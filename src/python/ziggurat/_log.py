"""The log of a training run: log.jsonl as columns."""
import json
import os
import time

from ._errors import UsageError
from ._tensorboard import EventFile


def flat(record, prefix=""):
    """(name, value) of all in the record; what is nested has names joined by dots."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Log:
    """The steps of a run, by column: log["loss"], log["bytes.nvme_read"], ... A step without a value has None.

    columns  their names, those of log.jsonl; what is nested there is joined by dots
    steps    the records as they are in the file
    """

    def __init__(self, steps, path=None):
        self.steps, self._path = steps, path
        self._flat = [dict(flat(s)) for s in steps]
        self.columns = list(dict.fromkeys(name for s in self._flat for name in s))

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, name):
        if name not in self.columns:
            there = "there are " + ", ".join(self.columns) if self.columns else "the run has not ended a step yet"
            raise UsageError("is no column", name, there)
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
        now -= sum(s.get("step_ms", 0) for s in self._flat) / 1e3  # when the first step began
        with EventFile(directory or os.path.dirname(self._path) or ".", now) as events:
            for step in self._flat:
                now += step.get("step_ms", 0) / 1e3
                events.add(step, now)
            return events.path

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
        """Plots over the steps with matplotlib, one below the other; returns the figure.

        names  columns, and "links": bytes of each link in a step, beside the step's time and the least that it could
               take (its bound, by the measured speed of what it needs most); "stalls": waiting, by cause.
               Default: loss, tokens_per_s, links, stalls
        axes   of matplotlib, to draw into: one, or as many as there are names
        """
        import matplotlib.pyplot as plt

        names = names or ("loss", "tokens_per_s", "links", "stalls")
        if axes is None:
            _, axes = plt.subplots(len(names), sharex=True, squeeze=False, figsize=(7, 2.2 * len(names)))
            axes = axes[:, 0]
        axes = list(axes) if hasattr(axes, "__iter__") else [axes]
        if len(axes) != len(names):
            raise UsageError(f"are {len(axes)}", "axes", f"{len(names)} are drawn: {', '.join(names)}")
        for name, axis in zip(names, axes):
            draw = {"links": self._plot_links, "stalls": self._plot_stalls}.get(name)
            if draw is not None:
                draw(axis)
            else:
                axis.plot(self["step"], self.array(name))
                axis.set_ylabel(name)
        axes[-1].set_xlabel("step")
        return axes[0].figure

    def _used(self, prefix):
        return [c for c in self.columns if c.startswith(prefix) and any(self[c])]

    def _plot_links(self, axis):
        for column in self._used("bytes."):
            axis.plot(self["step"], self.array(column) / 1e6, label=column[len("bytes.") :])
        axis.set_ylabel("MB per step")
        if axis.lines:
            axis.legend(loc="upper left")
        times = axis.twinx()
        for column, style in (("step_ms", "k-"), ("bound_ms", "k--")):
            if column in self.columns:
                times.plot(self["step"], self.array(column), style, linewidth=0.8, label=column)
        times.set_ylabel("ms")
        times.legend(loc="upper right")

    def _plot_stalls(self, axis):
        import numpy as np

        columns = self._used("stall_ms.")
        if columns:
            axis.stackplot(self["step"], [np.nan_to_num(self.array(c)) for c in columns],
                           labels=[c[len("stall_ms.") :] for c in columns])  # fmt: skip
            axis.legend(loc="upper left")
        axis.set_ylabel("ms waited")

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
