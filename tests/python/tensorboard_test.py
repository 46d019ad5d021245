"""Event files, read by the real TensorBoard."""
import json
import os

from support import InFolder, need

need("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

import ziggurat as zg  # noqa: E402


class EventFiles(InFolder):
    def test_a_log_as_an_event_file(self):
        with open(os.path.join(self.folder, "log.jsonl"), "w") as f:
            for step in (1, 2, 300_000):
                record = {"step": step, "loss": 1 / step, "step_ms": 10.0, "bytes": {"nvme_read": step * 10**6}}
                f.write(json.dumps(record | ({"val_loss": 3.0} if step == 2 else {}) | {"bound_by": "x"}) + "\n")
        events = EventAccumulator(zg.read_log(self.folder).to_tensorboard()).Reload()
        self.assertEqual(set(events.Tags()["scalars"]), {"loss", "step_ms", "bytes/nvme_read", "val_loss"})
        self.assertEqual([e.step for e in events.Scalars("loss")], [1, 2, 300_000])
        for event in events.Scalars("loss"):
            self.assertAlmostEqual(event.value, 1 / event.step, delta=1e-7)
        self.assertEqual([(e.step, e.value) for e in events.Scalars("val_loss")], [(2, 3.0)])
        times = [e.wall_time for e in events.Scalars("loss")]
        self.assertAlmostEqual(times[2] - times[0], 0.02, delta=1e-3)

    def test_a_run_writes_its_own(self):
        try:
            import ziggurat._train  # noqa: F401
        except ImportError:
            self.skipTest("this build has no training")
        with open(os.path.join(self.folder, "text.txt"), "w") as f:
            f.write("In the beginning God created the heaven and the earth. " * 100)
        out = os.path.join(self.folder, "run")
        result = zg.train({
            "model": {"arch": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32},
            "data": {"train": os.path.join(self.folder, "text.txt"), "tokenizer": "bytes", "seq_len": 32},
            "train_batch_size": 2, "steps": 3, "devices": "host", "tiers": {"device": "8MiB", "host": "8MiB"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "output": {"dir": out},
        }, tensorboard=True)  # fmt: skip
        (name,) = [n for n in os.listdir(out) if n.startswith("events.out.tfevents.")]
        events = EventAccumulator(os.path.join(out, name)).Reload()
        for column in ("loss", "phase_ms.forward", "bytes.nvme_read", "bound_ms"):
            found = events.Scalars(column.replace(".", "/"))
            self.assertEqual([e.step for e in found], [1, 2, 3])
            for event, value in zip(found, result.log[column]):
                self.assertAlmostEqual(event.value, value, delta=abs(value) * 1e-6)


if __name__ == "__main__":
    import unittest

    unittest.main()
