#!/usr/bin/env python3
"""Fine-tunes a causal language model by Hugging Face's Trainer, with the optimizer's state in host memory and, beyond
that, on a drive. Without --model it is a small GPT-2 with random weights, which reads bytes.

    python finetune_trainer.py [--model DIRECTORY] [--text FILE] [--steps 40] [--nvme DIRECTORY] [--out DIRECTORY]
    python finetune_trainer.py --resume ...      # goes on from the newest checkpoint of --out, with the same bits
"""
import argparse
import os

import torch
import transformers

import ziggurat.torch as zt

TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "


def load(directory):
    """The model, and a function that turns a text into token numbers."""
    if directory is None:
        config = transformers.GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4,
                                         bos_token_id=None, eos_token_id=None)  # fmt: skip
        return transformers.GPT2LMHeadModel(config), lambda text: list(text.encode())
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model, lambda text: tokenizer(text)["input_ids"]


def newest_complete(out):
    """The newest checkpoint in `out` that was written to its end; None: there is none."""
    names = os.listdir(out) if os.path.isdir(out) else []
    numbers = [int(name.split("-")[1]) for name in names if name.startswith("checkpoint-")]
    paths = [os.path.join(out, f"checkpoint-{n}") for n in sorted(numbers, reverse=True)]
    return next((p for p in paths if os.path.exists(os.path.join(p, "trainer_state.json"))), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory as Hugging Face has them")
    parser.add_argument("--text", help="a text file to learn")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--nvme", help="a directory on a drive")
    parser.add_argument("--nvme-size", default="1GiB", help="room for the state on the drive (default: %(default)s)")
    parser.add_argument("--host", default="1GiB", help="host memory for the state")
    parser.add_argument("--out", default="finetuned",
                        help="directory of the checkpoints and the model (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
    a = parser.parse_args()
    transformers.set_seed(0)
    model, numbers = load(a.model)
    text = open(a.text, encoding="utf-8").read() if a.text else TEXT * 40
    ids = numbers(text)
    samples = [ids[i : i + a.length] for i in range(0, len(ids) - a.length, a.length)]

    optimizer = {"host_bytes": a.host, "drives": {a.nvme: a.nvme_size} if a.nvme else {}, "state": "split",
                 "state_dict_limit": "16MiB"}  # fmt: skip
    args = transformers.TrainingArguments(
        output_dir=a.out, max_steps=a.steps, save_steps=a.save_every, per_device_train_batch_size=4,
        learning_rate=3e-3 if a.model is None else 2e-5, logging_steps=4, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), save_total_limit=2)  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": s, "labels": s} for s in samples],
        optimizer_cls_and_kwargs=zt.trainer_optimizer(args, **optimizer),  # with the arguments' learning rate
        callbacks=[zt.TrainerCallback()],  # saves state that is larger than state_dict_limit, a segment at a time
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=newest_complete(a.out) if a.resume else None)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss at step {entry['step']}: {entry['loss']:.4f}")
    trainer.save_model(os.path.join(a.out, "model"))


if __name__ == "__main__":
    main()
