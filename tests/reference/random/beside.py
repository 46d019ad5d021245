"""The program and transformers beside each other: what random_models.py and adapters.py share."""

import json
import math
import shutil
import subprocess
import warnings

import torch

import files  # takes the types of weight files, before float32 means float64

torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)

import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


class Wrong(Exception):
    """What the program does is not what it should do."""


class Refused(Exception):
    """Exit code 2, with what was said."""


class Program:
    def __init__(self, path, where):
        self.path, self.where = path, where

    def __call__(self, *args):
        try:
            done = subprocess.run([self.path, *map(str, args)], cwd=self.where, capture_output=True, text=True,
                                  timeout=300, errors="replace")
        except subprocess.TimeoutExpired:
            raise Wrong(f"hangs: {args}") from None
        if done.returncode == 2:
            raise Refused(done.stderr.strip()[-600:])
        if done.returncode != 0:
            raise Wrong(f"exit {done.returncode} of {' '.join(map(str, args))}: {done.stderr[-1500:]}")
        return done.stdout

    def judge(self, data, context, *more):
        """What `eval --json` says of a file."""
        out = self("eval", "--data", data, "--context", context, "--json", *more)
        return json.loads(out.splitlines()[-1])


def close(what, ours, theirs, bound):
    if not abs(ours - theirs) <= bound:
        raise Wrong(f"{what}: {ours!r} beside {theirs!r}, difference {abs(ours - theirs):.2e}, bound {bound:.1e}")


def close_loss(what, ours, theirs, bound=1e-5):
    close(what, ours, theirs, bound * max(1, abs(theirs)))


# ---- transformers

def model_of(directory):
    """The model of that config.json, as transformers reads it, with weights of its own."""
    config = transformers.AutoConfig.from_pretrained(directory)
    # The type of the file's torch_dtype would round Gemma's factor of the embedding.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    return model.double().eval()


def fill(r, model):
    torch.manual_seed(r.randrange(1 << 30))
    one = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape) * 1.2 / math.sqrt(p.shape[1]))
            elif name.endswith("weight"):  # of a norm
                p.copy_(one + 0.4 * torch.randn(p.shape))
            else:
                p.copy_(0.3 * torch.randn(p.shape))


def load(directory):
    """The model that lies there, whose names and shapes must be those of transformers."""
    model = model_of(directory)
    tensors = files.read_directory(directory)
    if model.config.model_type == "gpt2":
        tensors = {"transformer." + n.removeprefix("transformer.") if n != "lm_head.weight" else n: t
                   for n, t in tensors.items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    own = dict(model.named_parameters())
    if set(own) != set(tensors):
        raise Wrong(f"names of {directory.name} differ: {set(own) ^ set(tensors)}")
    with torch.no_grad():
        for name, p in own.items():
            if p.shape != tensors[name].shape:
                raise Wrong(f"{name} is {list(tensors[name].shape)}, not {list(p.shape)}")
            p.copy_(tensors[name])
    return model


def longest(model):
    rope = getattr(model.config, "rope_parameters", None) or {}
    n = model.config.max_position_embeddings
    return min(n, rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else n


def loss_sum(model, ids, targets):
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0], torch.tensor(targets), ignore_index=-100, reduction="sum")


def loss_of(model, documents):
    """The mean over all tokens of documents but their first ones."""
    with torch.no_grad():
        total = sum(loss_sum(model, d[:-1], d[1:]).item() for d in documents)
    return total / sum(len(d) - 1 for d in documents)


def torch_steps(model, run, sequences, parameters=None):
    """The losses and gradient norms of a run's steps, each over all sequences."""
    o, clip = run["optimizer"]["params"], run["gradient_clipping"]
    p = list(model.parameters()) if parameters is None else parameters
    groups = [{"params": [t for t in p if t.dim() == n], "weight_decay": o["weight_decay"] * (n == 2)} for n in (2, 1)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"],
                                  foreach=False)
    valid = sum(t >= 0 for _, targets in sequences for t in targets)
    losses, norms = [], []
    for _ in range(run["steps"]):
        optimizer.zero_grad()
        losses.append(0.0)
        for ids, targets in sequences:
            loss = loss_sum(model, ids, targets) / valid
            loss.backward()
            losses[-1] += loss.item()
        grads = [t.grad for t in p if t.grad is not None]
        norms.append(math.sqrt(sum(g.square().sum().item() for g in grads)))
        for g in grads if clip > 0 else []:
            g *= min(1.0, clip / (norms[-1] + 1e-6))
        optimizer.step()
    return losses, norms


# ---- runs

def draw_run(r, model, directory):
    """The configuration of a run of which each step goes over all sequences; and these."""
    most = longest(model)
    how = r.choice(["one", "one", "one", "data", "tensor", "context", "pipeline"])
    seq = min(most, r.choice([most, r.randint(2, most), 32]))
    if how == "context":  # what a ring can divide
        seq = max(4, seq // 4 * 4)
    for old in directory.glob("data.*"):  # of a run before
        old.unlink()
    data = dict(seq_len=seq, validation=0, tokenizer={"file": "model"})
    make = r.choice([files.windows, files.documents])
    count, sequences = make(r, model.config.vocab_size, seq, directory, data)
    params = dict(lr=r.choice([1e-3, 3e-3, 1e-4]), betas=[r.choice([0.9, 0.8]), r.choice([0.95, 0.999, 0.99])],
                  eps=r.choice([1e-8, 1e-6, 1e-4]), weight_decay=r.choice([0, 0.1, 0.01]))
    micro = r.choice([d for d in range(1, count + 1) if count % d == 0])
    run = dict(model={"from": "model"}, fp64={"enabled": True}, data=data, steps=r.randint(4, 8), seed=r.randrange(1000),
               optimizer=dict(type="AdamW", params=params), gradient_clipping=r.choice([0, 1.0, 0.1]),
               train_batch_size=count, train_micro_batch_size_per_gpu=micro, output={"dir": "run"})
    if r.chance(0.3):
        run["activation_checkpointing"] = {"recompute": r.chance(0.5)}
    if r.chance(0.2):
        run["tiers"] = {"tiles": "on"}
    if r.chance(0.2):
        run["accumulation"] = "micro_batch_major"
    if how == "data" and count // micro % 2 == 0:
        run |= dict(devices="host:2", zero_optimization=dict(stage=r.randint(0, 3)))
    if how == "tensor" and model.config.num_attention_heads % 2 == 0 and model.config.model_type != "olmo2":
        run |= dict(devices="host:2", parallel=dict(tensor=2, sequence=r.chance(0.4)))
    if how == "context":
        run |= dict(devices="host:2", parallel=dict(context=2, context_method=r.choice(["ring", "ulysses"])))
    if how == "pipeline" and model.config.num_hidden_layers > 1:
        run |= dict(devices="host:2", parallel=dict(pipeline=2, pipeline_schedule=r.choice(
            ["breadth_first", "1f1b", "gpipe", "zero_bubble"])))
    return run, sequences


HOW = ("devices", "parallel", "zero_optimization", "tiers", "accumulation", "activation_checkpointing", "lora")


def train(program, run, found, key):
    """Trains, and returns the log's steps."""
    found[key] = {k: run[k] for k in HOW if k in run} | {"packing": run["data"].get("packing", "none")}
    (program.where / "run.json").write_text(json.dumps(run, indent=1))
    shutil.rmtree(program.where / "run", ignore_errors=True)
    program("train", "run.json")
    return [e for e in map(json.loads, (program.where / "run/log.jsonl").read_text().splitlines()) if "loss" in e]


def compare_steps(run, log, losses, norms):
    """Both compute in float64. AdamW makes a step of the learning rate of any gradient that is far above eps, and so
    magnifies the rounding of small ones."""
    if len(log) != len(losses):
        raise Wrong(f"log.jsonl has {len(log)} steps of {len(losses)}")
    close_loss("loss of step 0", log[0]["loss"], losses[0], 1e-10)
    close("norm of step 0", log[0]["grad_norm"], norms[0], 1e-10 * max(1e-3, norms[0]))
    for i, (entry, loss) in enumerate(zip(log, losses)):
        close_loss(f"loss of step {i}", entry["loss"], loss, 1e-8)
