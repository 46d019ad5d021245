#!/usr/bin/env python3
"""Random small models: the program beside transformers, as a stranger would compare them.

    PYTHON tests/reference/random/random_models.py build/ziggurat [--seeds N] [--first SEED] [--only FAMILY] [--keep]

A seed draws a model of one of the families, its weight files and their type, data, and how the program trains.
transformers and PyTorch read the same config.json, and compute in float64:

- eval: the loss of documents of all lengths, with masks, in pieces of any context.
- generate, greedily: no token's logit is below the largest one.
- train, in fp64: AdamW steps with clipping, of windows or of packed documents, on one rank or on two in any division;
  then the saved model, as transformers loads it.
- with PEFT: eval, merge and train with an adapter that PEFT has made, and ours in PEFT (adapters.py).

A line of JSON for each seed; "WRONG" says what deviates, and then the files stay.  Exit code 1: something did; 77:
there is no torch or no transformers.  The tests run a few seeds.
"""

import argparse
import copy
import json
import pathlib
import shutil
import sys
import tempfile
import traceback

try:
    import torch

    from beside import (Program, Refused, Wrong, close, close_loss, compare_steps, draw_run, fill, load, longest,
                        loss_sum, model_of, torch_steps, train)
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

import draws
import files


def check_eval(r, model, program, found):
    vocab, most = model.config.vocab_size, longest(model)
    context = r.choice([most, r.randint(1, most)])
    lines, total, count = [], 0.0, 0
    for n in [r.choice([1, 2, r.randint(2, most), most, most + 1, r.randint(most, 2 * most + 3)])
              for _ in range(r.randint(1, 4))] + [3]:
        ids = [r.randrange(vocab) for _ in range(n)]
        mask = [1] * n
        line = {r.choice(["tokens", "input_ids"]): ids}
        if n != 3 and r.chance(0.5):
            mask = [int(r.chance(0.6)) for _ in ids]
            line |= r.choice([{"loss_mask": mask}, {"labels": [t if m else -100 for t, m in zip(ids, mask)]}])
        lines.append(json.dumps(line) + "\n")
        for at in range(0, n - 1, context):
            size = min(context, n - 1 - at)
            targets = files.labels(ids, mask, at, size)
            with torch.no_grad():
                total += loss_sum(model, ids[at:at + size], targets).item()
            count += sum(t >= 0 for t in targets)
    (program.where / "eval.jsonl").write_text("".join(lines))
    ours = program.judge("eval.jsonl", context, "--model", "model")
    if ours["tokens"] != count:
        raise Wrong(f"eval counts {ours['tokens']} tokens, there are {count}")
    close_loss("eval's loss", ours["loss"], total / count)
    found["eval"] = ours["loss"] - total / count


def check_generate(r, model, program, found):
    vocab, most = model.config.vocab_size, longest(model)
    prompt = [r.randrange(vocab) for _ in range(r.randint(1, min(20, most - 1)))]
    tokens = r.randint(1, most - len(prompt))
    out = program("generate", "--model", "model", "--prompt-ids", ",".join(map(str, prompt)), "--tokens", tokens,
                  "--greedy", "--ids")
    ours = [int(x) for x in out.strip().split(",")]
    if len(ours) != tokens:
        raise Wrong(f"generate makes {len(ours)} tokens of {tokens}")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ours]), use_cache=False).logits[0]
    for i, token in enumerate(ours):
        row = logits[len(prompt) + i - 1]
        gap = (row.max() - row[token]).item()
        if gap > 1e-4 * max(1, row.abs().max().item()):
            raise Wrong(f"generate's token {i} is {token}, whose logit is {gap:.2e} below that of {row.argmax()}")
    found["generated"] = tokens


def check_train(r, model, program, found):
    run, sequences = draw_run(r, model, program.where)
    log = train(program, run, found, "train")
    model = copy.deepcopy(model)
    compare_steps(run, log, *torch_steps(model, run, sequences))
    ids = torch.tensor([[r.randrange(model.config.vocab_size) for _ in range(min(longest(model), 24))]])
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (load(program.where / "run/model"), model))
    difference, size = (ours - theirs).abs().max().item(), max(1.0, theirs.abs().max().item())
    close("logits of the trained model", difference, 0, 5e-5 * size)  # it is saved in float32
    found["trained"] = difference / size


def check_adapters(r, model, program, found):
    try:
        import adapters
    except ImportError:
        found["adapters"] = "no PEFT"
        return
    adapters.check(r, model, program, found)


CHECKS = dict(eval=check_eval, generate=check_generate, train=check_train, adapters=check_adapters)


def examine(seed, program, model, checks, found):
    for name in checks:
        try:
            CHECKS[name](draws.Draw(f"{seed} {name}"), model, program, found)
        except Refused as e:
            found.setdefault("refused", []).append(f"{name}: {e}")


def one(seed, args):
    """All that was found with a seed."""
    r = draws.Draw(seed)
    family = args.only or r.choice(list(draws.FAMILIES))
    found = {"seed": seed, "family": family}
    directory = pathlib.Path(tempfile.mkdtemp(prefix=f"zg-{family}-{seed}-"))
    try:
        (directory / "model").mkdir()
        (directory / "model/config.json").write_text(json.dumps(draws.config(r, family), indent=1))
        try:
            model = model_of(directory / "model")
        except Exception as e:  # not ours to say
            found["transformers"] = f"{type(e).__name__}: {e}"[:200]
            return found
        fill(r, model)
        dtype = r.choice(["BF16", "F16", "F32", "F32"])
        files.save_model(r, model, directory / "model", dtype)
        files.write_tokenizer(directory / "model", model.config.vocab_size)
        found["what"] = f"{dtype}, {sum(p.numel() for p in model.parameters())} parameters"
        examine(seed, Program(args.program, directory), model, args.checks.split(","), found)
    except Wrong as e:
        found["WRONG"] = str(e)
    except Exception:
        found["WRONG"] = traceback.format_exc()[-1000:]
    finally:
        if args.keep or "WRONG" in found:
            found["files"] = str(directory)
        else:
            shutil.rmtree(directory)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument("--only", choices=list(draws.FAMILIES))
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--keep", action="store_true", help="keep the files")
    args = parser.parse_args()
    wrong = 0
    for seed in range(args.first, args.first + args.seeds):
        found = one(seed, args)
        print(json.dumps(found), flush=True)
        wrong += "WRONG" in found
    print(f"{args.seeds} models, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
