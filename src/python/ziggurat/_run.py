"""Training runs in this process."""
import contextlib
import json
import os
import tempfile
import time

from ._errors import UsageError
from ._log import flat, read_log
from ._records import Record
from ._tensorboard import EventFile


class RunResult(Record):
    """What a run ended with: steps, seconds, losses, tokens_per_second, peaks, bytes; output_dir and log."""


def train(config, *, overrides=(), steps=None, on_step=None, resume=None, tensorboard=False):
    """Trains a model as `ziggurat train` does, and returns a RunResult.

        result = ziggurat.train(["configs/quickstart.json"], steps=50, on_step=lambda s: print(s["step"], s["loss"]))

    config     a configuration file, several (keys of later ones win), or a dictionary with the same keys
    overrides  "key.of.config=value" texts, or a dictionary of such keys
    steps      optimizer steps, instead of the configuration's
    on_step    called after each step with its record of log.jsonl; returning False ends the run with the next step,
               as an exception does, which is raised when the model has been saved
    resume     a checkpoint's directory; "" for the newest one of checkpoint.path
    tensorboard  writes an event file for TensorBoard beside log.jsonl, step by step
    The run leaves log.jsonl, config.json and model/ in output.dir. Ctrl-C ends it so too, with the model saved, and
    raises KeyboardInterrupt. Other threads go on: the GIL is held by callbacks alone. Errors are those of this package.
    """
    try:
        from . import _train
    except ImportError as e:
        raise UsageError(f"is not in this package: {e}", "ziggurat.train()",
                         "wheels have the store and the optimizers alone; pip install . from the sources has it all"
                         ) from None  # fmt: skip
    given = dict(overrides) if hasattr(overrides, "items") else None
    texts = list(overrides) if given is None else [f"{k}={json.dumps(v)}" for k, v in given.items()]
    if steps is not None:
        texts.append(f"steps={int(steps)}")
    with tempfile.TemporaryDirectory(prefix="ziggurat-") as folder, contextlib.ExitStack() as opened:
        if isinstance(config, dict):
            files = [os.path.join(folder, "config.json")]
            with open(files[0], "w", encoding="utf-8") as f:
                json.dump(config, f)
        else:
            files = [os.fspath(f) for f in ([config] if isinstance(config, (str, os.PathLike)) else config)]
        out = _train.output_dir(files, texts)
        os.makedirs(out, exist_ok=True)
        events = opened.enter_context(EventFile(out, time.time())) if tensorboard else None

        def call(text):
            record = json.loads(text)
            if events is not None:
                events.add(dict(flat(record)), time.time())
            return True if on_step is None else on_step(record)

        result = RunResult(_train.train(files, texts, resume, call))
    result.output_dir, result.log = out, read_log(out)
    return result
