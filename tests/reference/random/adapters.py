"""Random adapters (LoRA) by PEFT beside models of random_models.py, and the program's own in PEFT."""

import copy
import json

import peft
import torch

import files
from beside import (Refused, Wrong, close, close_loss, compare_steps, draw_run, load, longest, loss_of, torch_steps,
                    train)

# Options that the program must refuse by their names, or compute as PEFT does.
ODD = [dict(bias="all"), dict(bias="lora_only"), dict(modules_to_save=["lm_head"]), dict(use_dora=True),
       dict(rank_pattern={"q_proj": 7, "c_attn": 7, "qkv_proj": 7}), dict(alpha_pattern={"o_proj": 5, "c_fc": 5}),
       dict(layers_to_transform=[0]), dict(target_modules=["lm_head"]), dict(lora_bias=True),
       dict(target_modules=".*(q_proj|c_attn|qkv_proj)"), dict(trainable_token_indices=[1, 2]),
       dict(exclude_modules=["o_proj"]), dict(target_modules=["embed_tokens", "wte"])]
MODULES = {"gpt2": ["c_attn", "c_fc", "c_proj"], "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted_by_peft(r, model, odd):
    names = MODULES.get(model.config.model_type, LLAMA)
    options = dict(r=r.choice([1, 2, 3, 5, 8, 16]), lora_alpha=r.choice([1, 2, 7, 16, 32]), use_rslora=r.chance(0.3),
                   lora_dropout=r.choice([0.0, 0.0, 0.1]),
                   target_modules="all-linear" if r.chance(0.2) else sorted(r.sample(names, r.randint(1, len(names)))))
    if model.config.model_type == "gpt2":
        options["fan_in_fan_out"] = r.chance(0.8)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **(options | odd)),
                                  autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                # Far larger ones would saturate the softmax, which magnifies rounding.
                size = 0.3 / max(1, adapted.peft_config["default"].lora_alpha / adapted.peft_config["default"].r) ** 0.5
                p.data = (torch.randn(p.shape) * size).to(files.TYPES["F32"]).to(files.TYPES["F64"])
    return adapted


def save(adapted, directory):
    """As save_pretrained() does, which must not meet float64 under the name of float32."""
    directory.mkdir()
    tensors = peft.get_peft_model_state_dict(adapted)
    files.write_safetensors(directory / "adapter_model.safetensors", tensors, "F32")
    config = adapted.peft_config["default"].to_dict() | dict(
        peft_type="LORA", task_type="CAUSAL_LM", inference_mode=True, base_model_name_or_path="model")
    (directory / "adapter_config.json").write_text(json.dumps(
        {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}))


def in_peft(model, directory):
    """The program's adapter beside the model."""
    config = json.loads((directory / "adapter_config.json").read_text())
    known = {k: v for k, v in config.items() if k not in ("peft_type", "task_type", "inference_mode")}
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **known),
                                  autocast_adapter_dtype=False).eval()
    result = peft.set_peft_model_state_dict(adapted, files.read_safetensors(directory / "adapter_model.safetensors"))
    missing = [name for name in result.missing_keys if "lora_" in name]
    if result.unexpected_keys or missing:
        raise Wrong(f"PEFT misses {missing[:3]}, and does not know {result.unexpected_keys[:3]}")
    return adapted


def check(r, model, program, found):
    odd = r.choice(ODD) if r.chance(0.25) else {}
    try:
        adapted = adapted_by_peft(r, model, odd)
    except ValueError as e:
        found["PEFT"] = f"{odd}: {e}"[:150]
        return
    config = adapted.peft_config["default"]
    save(adapted, program.where / "adapter")
    found["adapter"] = dict(r=config.r, alpha=config.lora_alpha, rslora=config.use_rslora,
                            modules=str(config.target_modules), dropout=config.lora_dropout) | odd
    documents = [[r.randrange(model.config.vocab_size) for _ in range(r.randint(2, longest(model)))] for _ in range(2)]
    (program.where / "adapted.jsonl").write_text("".join(json.dumps({"tokens": d}) + "\n" for d in documents))

    def judge(*more):
        return program.judge("adapted.jsonl", longest(model), "--model", *more)["loss"]

    theirs = loss_of(adapted, documents)
    try:
        ours = judge("model", "--adapter", "adapter")
    except Refused as e:
        if not odd:
            raise
        found["refused adapter"] = str(e)
        if not any(str(part) in str(e) for item in odd.items() for part in item):
            raise Wrong(f"{odd} is not refused by its name: {e}") from None
        return
    close_loss("loss with PEFT's adapter", ours, theirs)
    program("merge", "model", "adapter", "merged")
    merged = load(program.where / "merged")
    if not found["what"].startswith("BF16"):  # else it is rounded to that
        close_loss("loss of the merged model", loss_of(merged, documents), theirs)
    close_loss("loss of the merged model in eval", judge("merged"), loss_of(merged, documents))
    train_on(r, model, adapted, program, documents, judge, found)


def train_on(r, model, adapted, program, documents, judge, found):
    config = adapted.peft_config["default"]
    run, sequences = draw_run(r, model, program.where)
    new = r.chance(0.3)
    run["lora"] = dict(rank=config.r, alpha=config.lora_alpha, rslora=config.use_rslora) if new else {"from": "adapter"}
    before = {p.name: p.read_bytes() for p in (program.where / "model").iterdir()}
    log = train(program, run, found, "adapter's train")
    if before != {p.name: p.read_bytes() for p in (program.where / "model").iterdir()}:
        raise Wrong("the base's files have changed")
    if new:
        close_loss("loss of the first step with new adapters", log[0]["loss"],
                   torch_steps(copy.deepcopy(model), run | {"steps": 1}, sequences)[0][0], 1e-10)
    elif config.lora_dropout == 0:
        compare_steps(run, log, *torch_steps(adapted, run, sequences,
                                             [p for name, p in adapted.named_parameters() if "lora_" in name]))
    ours = judge("model", "--adapter", "run/adapter")
    close_loss("our adapter in PEFT", ours, loss_of(in_peft(model, program.where / "run/adapter"), documents))
    if not new and config.lora_dropout == 0:
        close_loss("our trained adapter beside torch's", ours, loss_of(adapted, documents))
