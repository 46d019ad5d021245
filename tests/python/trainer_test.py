"""Hugging Face's Trainer and Accelerate with the optimizers, by the lines of docs/python.md; needs both packages."""
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings

from support import InFolder, need, same_bits

need("torch", "transformers", "accelerate")

import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402

import ziggurat.torch as zt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "tools/examples/finetune_trainer.py"


def tiny_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                                     bos_token_id=None, eos_token_id=None)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def samples():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 96, (64, 16), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


class Stop(transformers.TrainerCallback):
    """Ends the run as a kill would: by an exception in the middle of it."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        if state.global_step == self.step:
            raise KeyboardInterrupt


class TrainerRuns(InFolder):
    def arguments(self, name, **others):
        return transformers.TrainingArguments(
            output_dir=os.path.join(self.folder, name), max_steps=8, per_device_train_batch_size=4, save_steps=4,
            logging_steps=1, report_to=[], use_cpu=True, seed=0, disable_tqdm=True, learning_rate=1e-2,
            lr_scheduler_type="linear", gradient_accumulation_steps=2, **others,
        )  # fmt: skip

    def finish(self, trainer, resume=None):
        """Trains; returns the losses, the weights and the optimizer."""
        try:
            trainer.train(resume_from_checkpoint=resume)
        except KeyboardInterrupt:
            pass
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if hasattr(optimizer, "close"):
            optimizer.close()
        losses = [(e["step"], e["loss"]) for e in trainer.state.log_history if "loss" in e]
        return losses, list(trainer.model.parameters()), optimizer

    def run_trainer(self, name, stop=None, resume=None, **options):
        drive = os.path.join(self.folder, name + "-drive")
        os.makedirs(drive, exist_ok=True)
        options = {"drives": {drive: "64MiB"}, "host_bytes": "256KiB", "segment_bytes": "64KiB", **options}
        args = self.arguments(name)
        trainer = transformers.Trainer(
            model=tiny_gpt2(), args=args, train_dataset=samples(),
            optimizer_cls_and_kwargs=zt.trainer_optimizer(args, **options),
            callbacks=[zt.TrainerCallback(), *([Stop(stop)] if stop else [])],
        )  # fmt: skip
        losses, weights, _ = self.finish(trainer, resume)
        return losses, weights, trainer

    def test_losses_and_weights_are_those_of_adamw_torch(self):
        # GPT-2's key biases have a gradient of 0 but for rounding. Adam with its own eps of 1e-8 makes steps of that
        # noise, which no two orders of additions have in common; with this one they stay below the bound.
        args = self.arguments("torch", optim="adamw_torch", adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6,
                              weight_decay=0.1, warmup_steps=2, save_strategy="no")  # fmt: skip
        common = {"args": args, "train_dataset": samples()}
        expected, theirs, reference = self.finish(transformers.Trainer(model=tiny_gpt2(), **common))
        self.assertIsInstance(reference, torch.optim.AdamW)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*its own default lr")
            trainer = transformers.Trainer(
                model=tiny_gpt2(), optimizer_cls_and_kwargs=zt.trainer_optimizer(args, host_bytes="8MiB"),
                callbacks=[zt.TrainerCallback()], **common)  # fmt: skip
            found, ours, optimizer = self.finish(trainer)
        self.assertIsInstance(optimizer, zt.AdamW)
        for (step, a), (other, b) in zip(found, expected, strict=True):
            self.assertEqual(step, other)
            self.assertAlmostEqual(a, b, delta=1e-5)
        started = list(tiny_gpt2().parameters())
        for a, b, c in zip(ours, theirs, started, strict=True):
            self.assertLess((a - b).abs().max().item(), 1e-6)
            self.assertGreater((a - c).abs().max().item(), 1e-3)

    def test_an_optimizer_that_was_left_at_its_own_learning_rate(self):
        for options, warned in (({}, 1), ({"lr": 2e-3}, 0)):
            trainer = transformers.Trainer(
                model=tiny_gpt2(), args=self.arguments("default", save_strategy="no"), train_dataset=samples(),
                optimizer_cls_and_kwargs=(zt.AdamW, {"host_bytes": "8MiB", **options}),
                callbacks=[zt.TrainerCallback(), Stop(1)])  # fmt: skip
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                self.finish(trainer)
            self.assertEqual(sum("its own default lr 0.001" in str(w.message) for w in seen), warned)

    def test_options_from_the_arguments(self):
        args = self.arguments("options", adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6)
        kind, options = zt.trainer_optimizer(args, eps=1e-7, state="split")
        self.assertIs(kind, zt.AdamW)
        self.assertEqual(options, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "state": "split"})
        self.assertEqual(zt.trainer_optimizer(args, zt.Lion), (zt.Lion, {"lr": 1e-2}))

    def test_stopped_and_resumed_as_if_it_had_not_stopped(self):
        for name, options in (("whole", {}), ("referred", {"state_dict_limit": 1000})):
            losses, weights, trainer = self.run_trainer(name, **options)
            self.assertLess(losses[-1][1], losses[0][1])
            self.assertGreater(sum(e.get("ziggurat_nvme_read_bytes", 0) for e in trainer.state.log_history), 0)
            cut = name + "-cut"
            self.run_trainer(cut, stop=6, **options)
            checkpoint = os.path.join(self.folder, cut, "checkpoint-4")
            self.assertEqual(os.path.isdir(os.path.join(checkpoint, "ziggurat")), "referred" == name)
            again, resumed, _ = self.run_trainer(cut, resume=checkpoint, **options)
            self.assertEqual(losses, again)
            self.assertTrue(same_bits(weights, resumed))

    def test_the_example_killed_and_resumed(self):
        def start(folder, *more):
            command = [sys.executable, EXAMPLE, "--steps", "12", "--save-every", "4", "--out", folder, *more]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        whole = start(os.path.join(self.folder, "whole"), "--nvme", self.folder)
        expected, err = whole.communicate(timeout=200)
        self.assertEqual(whole.returncode, 0, err)
        folder = pathlib.Path(self.folder, "cut")
        cut = start(folder, "--nvme", self.folder)
        mark = folder / "checkpoint-4" / "trainer_state.json"  # what a checkpoint ends with
        for _ in range(2000):
            if mark.exists() or cut.poll() is not None:
                break
            time.sleep(0.05)
        cut.send_signal(signal.SIGKILL)
        cut.communicate()
        resumed = start(folder, "--nvme", self.folder, "--resume")
        found, err = resumed.communicate(timeout=200)
        self.assertEqual(resumed.returncode, 0, err)
        last = lambda text: [line for line in text.splitlines() if line.startswith("loss")]  # noqa: E731
        self.assertEqual(last(found), last(expected))


class AcceleratedLoops(InFolder):
    def train(self, wrap, steps=6, clip=True):
        model, accelerator = tiny_gpt2(), Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = zt.AdamW(model.parameters(), lr=1e-2, host_bytes="64MiB")
        self.addCleanup(optimizer.close)
        if wrap:
            model, wrapped = accelerator.prepare(model, optimizer)
            wrapped = accelerator.prepare(wrapped)  # again
        for step, sample in enumerate(samples()[: 2 * steps]):
            ids = torch.tensor([sample["input_ids"]])
            if not wrap:
                (model(input_ids=ids, labels=ids).loss / 2).backward()
                if step % 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                wrapped.step()
                wrapped.zero_grad()
        return list(model.parameters()), accelerator, optimizer

    def test_accumulation_clipping_and_prepare_twice(self):
        plain, _, _ = self.train(wrap=False)
        wrapped, _, _ = self.train(wrap=True)
        self.assertTrue(same_bits(plain, wrapped))

    def test_save_state_and_load_state(self):
        weights, accelerator, optimizer = self.train(wrap=True)
        before = optimizer.state_dict()["state"]
        kept = [w.detach().clone() for w in weights]
        accelerator.save_state(os.path.join(self.folder, "state"))
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer.step()
        accelerator.load_state(os.path.join(self.folder, "state"))
        self.assertTrue(same_bits(kept, weights))
        for i, entry in optimizer.state_dict()["state"].items():
            self.assertTrue(same_bits(entry.values(), before[i].values()))


if __name__ == "__main__":
    import unittest

    unittest.main()
