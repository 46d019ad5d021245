"""offload() of models of transformers and PEFT, none changed for it, beside themselves in memory. Needs both."""
import functools
import importlib.util
import os
import pathlib
import re

from support import InFolder, need, same_bits

need("torch", "transformers", "peft")

import torch  # noqa: E402
import transformers as tf  # noqa: E402

import ziggurat as zg  # noqa: E402
import ziggurat.torch as zt  # noqa: E402

torch.set_num_threads(1)
tf.logging.set_verbosity_error()
LM = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
          num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
TEXT = dict(LM, head_dim=16)


def tokens(batch=2, length=9):
    return torch.randint(3, 128, (batch, length))


def causal(model):
    ids = tokens()
    return model(input_ids=ids, labels=ids).loss


def seq2seq(model):
    return model(input_ids=tokens(), labels=tokens()).loss


def classes(model):
    return model(input_ids=tokens(), labels=torch.tensor([0, 1])).loss


def pixels(model):
    return model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss


def audio(model):
    return model(input_features=torch.randn(2, 16, 40), labels=tokens()).loss


def picture_and_text(model):
    ids = tokens(1, 12)
    ids[0, 2:6] = 100  # the picture's four patches of 2 x 2
    return model(input_ids=ids, labels=ids, pixel_values=torch.randn(16, 3 * 2 * 4 * 4),
                 image_grid_thw=torch.tensor([[1, 4, 4]]), mm_token_type_ids=(ids == 100).int()).loss  # fmt: skip


def qwen2_vl():
    text = dict(LM, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2)
    return tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=100,
                                                               vision_start_token_id=101, video_token_id=102))  # fmt: skip


# name -> how it is made, and its loss
MODELS = {
    "gpt2": (lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64,
                                                     bos_token_id=1, eos_token_id=2)), causal),
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**LM)), causal),
    "qwen3": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**TEXT)), causal),
    "gemma3": (lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**TEXT, sliding_window=4)), causal),
    "mixtral": (lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**LM, num_local_experts=4)), causal),
    "t5": (lambda: tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=128, d_model=32, d_kv=16, d_ff=48, num_layers=2,
                                                             num_heads=2, decoder_start_token_id=0)), seq2seq),
    "bert": (lambda: tf.BertForSequenceClassification(tf.BertConfig(
        **{k: v for k, v in LM.items() if k != "num_key_value_heads"})), classes),
    "vit": (lambda: tf.ViTForImageClassification(tf.ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                                             num_attention_heads=2, image_size=16, patch_size=4)), pixels),
    "whisper": (lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(
        vocab_size=128, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)), audio),
    "qwen2_vl": (qwen2_vl, picture_and_text),
}  # fmt: skip


class Case(InFolder):
    def made(self, name, dtype=torch.float32):
        torch.manual_seed(0)
        return MODELS[name][0]().to(dtype)

    def offload(self, model, **options):
        options = {"min_bytes": 512, "drives": {self.folder: "64MiB"}, **options}
        if "host_bytes" not in options:  # a tenth of all, where that has room for the update of the largest parameter
            every, largest = (f(p.numel() * 16 for p in model.parameters()) for f in (sum, max))
            options["host_bytes"] = max(every // 10, largest * 3 // 4 + 8192)
        off = zt.offload(model, **options)
        self.addCleanup(off.close)
        return off

    def train(self, model, loss_of, store=None, steps=4):
        optimizer = zt.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, segment_bytes=4096,
                             **({"store": store} if store else {"host_bytes": "64MiB"}))  # fmt: skip
        torch.manual_seed(1)
        told = []
        for _ in range(steps):
            for _ in range(2):
                loss = loss_of(model)
                loss.backward()
                told.append(loss.item())
                del loss
            told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        self.state_bytes = optimizer.state_bytes()
        optimizer.close()
        return told

    def check_the_drive(self, off, steps):
        """Each step reads what it uses: all but a budget of that was on the drive when it began."""
        told = off.statistics()
        host, budget = told.store.tiers.host, told.store.tiers.host.budget
        self.assertLessEqual(host.peak, budget)
        absent = told.parameter_bytes + self.state_bytes - budget
        self.assertGreater(absent, 0)
        self.assertGreaterEqual(told.store.links.nvme_read.bytes, (steps - 1) * absent)

    def compare(self, name, dtype=torch.float32, steps=4):
        plain, ours, loss_of = self.made(name, dtype), self.made(name, dtype), MODELS[name][1]
        plain.train(), ours.train()
        expected = self.train(plain, loss_of, steps=steps)
        off = self.offload(ours)
        self.assertEqual(expected, self.train(ours, loss_of, off.store, steps=steps))
        self.check_the_drive(off, steps)
        off.close()
        self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))


class Architectures(Case):
    def test_bits(self):
        for name in MODELS:
            for dtype in (torch.float32, torch.bfloat16) if name not in ("vit", "whisper", "qwen2_vl") else (torch.float32,):
                with self.subTest(name=name, dtype=dtype):
                    self.compare(name, dtype, steps=20 if name == "llama" else 4)

    def test_gradient_checkpointing(self):
        for reentrant in (True, False):
            plain, ours = self.made("llama"), self.made("llama")
            for model in (plain, ours):
                model.train()
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                if reentrant:
                    model.enable_input_require_grads()
            off = self.offload(ours)
            self.assertEqual(self.train(plain, causal), self.train(ours, causal, off.store))
            self.check_the_drive(off, steps=4)
            off.close()
            self.assertTrue(same_bits(plain.parameters(), ours.parameters()))

    def test_generate_with_a_cache(self):
        for name in ("gpt2", "llama", "mixtral", "t5"):
            plain, ours = self.made(name).eval(), self.made(name).eval()
            off = self.offload(ours)
            ids = tokens(1, 5)
            expected, found = (m.generate(ids, max_new_tokens=8, do_sample=False) for m in (plain, ours))
            self.assertTrue(torch.equal(expected, found), name)
            off.close()


class Adapters(Case):
    def test_lora_over_a_frozen_base(self):
        from peft import LoraConfig, get_peft_model

        def made():
            torch.manual_seed(0)
            return get_peft_model(tf.LlamaForCausalLM(tf.LlamaConfig(**dict(LM, num_hidden_layers=6))),
                                  LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1))  # fmt: skip

        for dtype in (torch.float32, torch.bfloat16):
            plain, ours = made().to(dtype), made().to(dtype)
            base = sum(p.nbytes for p in ours.parameters() if not p.requires_grad and p.nbytes >= 2048)
            off = self.offload(ours, min_bytes=2048, host_bytes=base // 3)
            expected = self.train(plain, causal, steps=20)
            self.assertEqual(expected, self.train(ours, causal, off.store, steps=20))
            self.assertTrue(all(p.grad is None and p._own.slot is None for p in ours.parameters()
                                if isinstance(p, zt.Stored) and not p.requires_grad))  # fmt: skip
            off.store.demote()
            off.store.drain()
            before = off.statistics().store.links
            # The adapters are small and stay in memory, as their state does now: the store has the base alone.
            self.assertEqual(self.train(plain, causal, steps=6), self.train(ours, causal, steps=6))
            links = off.statistics().store.links
            self.assertEqual(links.nvme_write.bytes, before.nvme_write.bytes)
            # Two micro-batches in each step read all of it, and a third at most was there.
            self.assertGreaterEqual(links.nvme_read.bytes - before.nvme_read.bytes, 6 * 2 * (base - base // 3))
            off.close()
            self.assertTrue(same_bits(plain.state_dict().values(), ours.state_dict().values()))


class Page(Case):
    def need_accelerate(self):
        if importlib.util.find_spec("accelerate") is None:
            self.skipTest("accelerate, which the Trainer needs, is missing: tools/python_packages.sh --torch brings it")

    def test_the_code_of_the_page_runs_as_it_stands(self):
        """Block after block, in one namespace; drives and sizes are the test's."""
        self.need_accelerate()
        page = pathlib.Path(__file__).resolve().parents[2] / "docs/offload.md"
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        self.assertEqual(len(blocks), 3)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        self.made("llama").save_pretrained("llama")
        ids = torch.randint(3, 128, (4, 9))
        names = {"functools": functools, "torch": torch, "transformers": tf, "model": self.made("llama"),
                 "loader": [{"input_ids": ids, "labels": ids}] * 2,
                 "data": [{"input_ids": row, "labels": row} for row in ids]}  # fmt: skip
        begun = [p.detach().clone() for p in names["model"].parameters()]
        for block in blocks:
            for documented, here in (("/mnt/nvme0", self.folder), ("200GiB", "64MiB"), ("8GiB", "256KiB"),
                                     ('"1GB"', '"30KB"'),
                                     ("max_steps=100", "max_steps=2, report_to=[], disable_tqdm=True")):  # fmt: skip
                block = block.replace(documented, here)
            block = block.replace("zt.offload(model,", "zt.offload(model, min_bytes=1024,")
            exec(compile(block, str(page), "exec"), names)
            off, trained = names["off"], names["model"]
            if "off.close()" not in block:
                self.assertEqual(off.store._core.leases, 0)
                self.assertGreater(off.statistics().parameters, 10)
                if "trainer" in names:
                    names["trainer"].optimizer.optimizer.close()
                off.close()
            self.assertEqual([type(p) for p in trained.parameters()], [torch.nn.Parameter] * len(begun))
            changed = [not torch.equal(a, b) for a, b in zip(begun, trained.parameters()) if a.dim() > 1]
            self.assertEqual(changed, ["step()" in block or "train()" in block] * len(changed))

    def test_trainer_and_its_checkpoints(self):
        """Losses, weights and the state that is resumed are those of the model in memory."""
        self.need_accelerate()

        def run(name, offloaded, resume=None):
            model = self.made("llama")
            args = tf.TrainingArguments(
                output_dir=os.path.join(self.folder, name), max_steps=4, per_device_train_batch_size=2, save_steps=2,
                logging_steps=1, report_to=[], use_cpu=True, seed=0, disable_tqdm=True, learning_rate=1e-2,
                gradient_accumulation_steps=2)  # fmt: skip
            off = self.offload(model) if offloaded else None
            model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="20KB")
            torch.manual_seed(7)
            data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 128, (16, 9))]
            trainer = tf.Trainer(
                model=model, args=args, train_dataset=data, callbacks=[zt.TrainerCallback()],
                optimizer_cls_and_kwargs=zt.trainer_optimizer(
                    args, segment_bytes=4096, **({"store": off.store} if off else {"host_bytes": "64MiB"})))  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
            optimizer = trainer.optimizer
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            optimizer.close()
            if off:
                self.assertGreater(off.statistics().store.links.nvme_read.bytes, 0)
                off.close()
            return losses, list(model.parameters())

        losses, weights = run("plain", False)
        found, ours = run("ours", True)
        self.assertEqual(losses, found)
        self.assertTrue(same_bits(weights, ours))
        found, ours = run("ours", True, os.path.join(self.folder, "ours", "checkpoint-2"))
        self.assertEqual(losses, found)
        self.assertTrue(same_bits(weights, ours))


class Files(Case):
    def test_save_pretrained_and_read_straight_into_the_store(self):
        plain, ours = self.made("llama"), self.made("llama")
        off = self.offload(ours)
        folder = os.path.join(self.folder, "model")
        ours.save_pretrained(folder, max_shard_size="40KB")
        self.assertGreater(len([n for n in os.listdir(folder) if n.endswith(".safetensors")]), 2)
        self.assertEqual(off.store._core.leases, 0)
        self.assertTrue(same_bits(plain.parameters(), tf.LlamaForCausalLM.from_pretrained(folder).parameters()))
        with zt.empty_parameters():
            again = tf.LlamaForCausalLM(tf.LlamaConfig(**LM))
        with zt.offload(again, files=folder, host_bytes="256KiB", min_bytes=512) as other:
            self.assertLessEqual(other.statistics().store.tiers.host.peak, 256 << 10)
            ids = tokens()
            with torch.no_grad():
                self.assertTrue(torch.equal(plain.eval()(ids).logits, again.eval()(ids).logits))


if __name__ == "__main__":
    import unittest

    unittest.main()
