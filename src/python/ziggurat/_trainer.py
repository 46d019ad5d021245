"""Hugging Face's Trainer with the optimizers, whose state may be larger than a state_dict()."""
import inspect
import os
import warnings

import transformers

from .torch import AdamW


def trainer_optimizer(args, kind=AdamW, **options):
    """For `Trainer(args=args, optimizer_cls_and_kwargs=zt.trainer_optimizer(args, ...))`: (kind, its options).

    The Trainer gives a class named there no option by itself, not even the learning rate. Here it has learning_rate of
    the TrainingArguments, and Adam and AdamW also have adam_beta1, adam_beta2 and adam_epsilon; `options` are those of
    `kind` and win over them. weight_decay comes from the Trainer, which makes a group of what does not decay.
    """
    taken = {"lr": args.learning_rate}
    if issubclass(kind, AdamW):  # Adam too
        taken.update(betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
    return kind, {**taken, **options}


class TrainerCallback(transformers.TrainerCallback):
    """For `Trainer(..., callbacks=[zt.TrainerCallback()])` with an optimizer of this package.

    Saves state larger than state_dict_limit into checkpoint-N/ziggurat, a segment in memory at a time, before the
    Trainer asks for state_dict(), which then names it; resuming reads it from there. Adds to each log what the store
    has moved since the log before: ziggurat_nvme_read_bytes, ziggurat_nvme_write_bytes and ziggurat_waited_seconds.
    Warns where the optimizer has not got the arguments' learning rate, but has its own default.
    """

    def __init__(self):
        self._optimizer, self._before = None, {}

    def on_train_begin(self, args, state, control, optimizer=None, **others):
        # Accelerate wraps it.
        while optimizer is not None and not hasattr(optimizer, "state_bytes"):
            optimizer = getattr(optimizer, "optimizer", None)
        self._optimizer = optimizer
        if optimizer is not None:
            self._warn_of_default_lr(optimizer, args)

    @staticmethod
    def _warn_of_default_lr(optimizer, args):
        default = inspect.signature(type(optimizer)).parameters["lr"].default
        # A scheduler has changed lr by now, and has left there what it began with.
        found = {group.get("initial_lr", group["lr"]) for group in optimizer.param_groups}
        if found == {default} and default != args.learning_rate:
            warnings.warn(f"the optimizer trains with its own default lr {default}, not with the arguments' "
                          f"learning_rate {args.learning_rate}, which the Trainer does not hand on; take "
                          "optimizer_cls_and_kwargs=zt.trainer_optimizer(args, ...)", stacklevel=2)  # fmt: skip

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
