"""Results as objects: attributes instead of keys, text for people, and tables in notebooks."""
import html


def _text(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("bytes_per_second"):
        return f"{value / 1e9:.2f} GB/s"
    if name.endswith("bytes") or name in ("budget", "used", "peak", "memory", "available_memory"):
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


class Record:
    """Values by name: as attributes, by `record["name"]`, and as a dictionary (`as_dict()`)."""

    def __init__(self, values):
        self.__dict__.update({k: _wrap(v) for k, v in values.items()})

    def __getitem__(self, name):
        return self.__dict__[name]

    def __iter__(self):
        return iter(self.__dict__)

    def items(self):
        return self.__dict__.items()

    def as_dict(self):
        """The same as dictionaries and lists, for json.dump() and others."""
        return {k: _unwrap(v) for k, v in self.__dict__.items()}

    def __eq__(self, other):
        return isinstance(other, Record) and self.as_dict() == other.as_dict()

    def __repr__(self):
        lines = [type(self).__name__]
        for name, value in self.__dict__.items():
            if isinstance(value, Record):
                lines += [f"  {name}"] + ["  " + line for line in repr(value).splitlines()[1:]]
            else:
                lines.append(f"  {name:22} {_text(name, value)}")
        return "\n".join(lines)

    def _rows(self, prefix=""):
        for name, value in self.__dict__.items():
            if isinstance(value, Record):
                yield from value._rows(f"{prefix}{name}.")
            else:
                yield prefix + name, _text(name, value)

    def _repr_html_(self):
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(n)}</td><td>{html.escape(v)}</td></tr>"
            for n, v in self._rows()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _wrap(value):
    if isinstance(value, dict):
        return Record(value)
    if isinstance(value, (list, tuple)):
        return [_wrap(v) for v in value]
    return value


def _unwrap(value):
    if isinstance(value, Record):
        return value.as_dict()
    if isinstance(value, list):
        return [_unwrap(v) for v in value]
    return value


class Statistics(Record):
    """What a store has done: tiers (device, host, nvme), links, waits and their causes."""


class BenchResult(Record):
    """A measurement of drives: bytes_per_second, read and write with latencies in seconds, CPU time."""


class Probe(Record):
    """What this machine has: processor, memory, drives, back ends, and the paths that were asked for."""


class TuneResult(Record):
    """The fastest settings of drives that were found.

    aio         the settings as DeepSpeed's "aio" section has them
    candidates  the best points with their rates, the best first
    verdict     how sure that is, in words
    """

    def _repr_html_(self):
        names = ["text", "read_bytes_per_second", "write_bytes_per_second", "rounds"]
        head = "".join(f"<th>{n}</th>" for n in names)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_text(n, c[n]))}</td>" for n in names) + "</tr>"
            for c in self.candidates
        )
        return f"<p>{html.escape(self.verdict)}</p><table><tr>{head}</tr>{rows}</table>"
