"""Hugging Face's Trainer with an optimizer whose state is larger than its state_dict() may be."""
import os

import transformers


class TrainerCallback(transformers.TrainerCallback):
    """For `Trainer(..., callbacks=[zt.TrainerCallback()])` with an optimizer of this package.

    Saves state larger than state_dict_limit into checkpoint-N/ziggurat, a segment in memory at a time, before the
    Trainer asks for state_dict(), which then names it; resuming reads it from there. Adds to each log what the store
    has moved since the log before: ziggurat_nvme_read_bytes, ziggurat_nvme_write_bytes and ziggurat_waited_seconds.
    """

    def __init__(self):
        self._optimizer, self._before = None, {}

    def on_train_begin(self, args, state, control, optimizer=None, **others):
        # Accelerate wraps it.
        while optimizer is not None and not hasattr(optimizer, "state_bytes"):
            optimizer = getattr(optimizer, "optimizer", None)
        self._optimizer = optimizer

    def _save(self, args, state, control):
        o = self._optimizer
        if o is not None and control.should_save and o.above_limit():
            o.save(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "ziggurat"))

    def on_step_end(self, args, state, control, **others):
        self._save(args, state, control)

    def on_epoch_end(self, args, state, control, **others):
        self._save(args, state, control)

    def on_log(self, args, state, control, logs=None, **others):
        if self._optimizer is None or logs is None or self._optimizer.store.closed:
            return
        s = self._optimizer.store.statistics()
        now = {"nvme_read_bytes": s.links.nvme_read.bytes, "nvme_write_bytes": s.links.nvme_write.bytes,
               "waited_seconds": s.waited_seconds}  # fmt: skip
        moved = {f"ziggurat_{k}": v - self._before.get(k, 0) for k, v in now.items()}
        self._before = now
        logs.update(moved)
        if state.log_history:
            state.log_history[-1].update(moved)
