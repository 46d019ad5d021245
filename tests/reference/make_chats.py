#!/usr/bin/env python3
"""Writes chats.json: conversations as transformers' apply_chat_template() writes them.

    pip install transformers jinja2; tests/reference/make_chats.py

The templates are those of the families' instruct models, written down again for what they have of conversations
between a user and the model: without tools, images and a system's message that a user gives. For each there are the
tokens by which `generate --chat` tells the family, and what it is to make of three conversations.
"""
import datetime
import json
import pathlib

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

SYSTEM_FIRST = ("{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + "
                "'<|im_end|>\\n' }}")
CHATML_TURNS = ("{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
                "'<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
                "{%- endif %}")
CHATML_WITHOUT_THOUGHTS = CHATML_TURNS.replace(
    "message.content + ", "(message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' and "
    "'</think>' in message.content else message.content) + ")


def chatml(system):
    """Qwen2's form, of which SmolLM2's differs in the message alone."""
    return ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
            "{{ '<|im_start|>system\n" + system + "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
            "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
            "{{ '<|im_start|>assistant\n' }}{% endif %}")


def llama(date):
    """Llama 3.1 and later; without a date that of Llama 3."""
    system = ("{%- if not date_string is defined %}" + date + "{%- endif %}{#- The system's message. #}"
              "{%- set system_message = \"\" %}{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}"
              "{{- \"Cutting Knowledge Date: December 2023\\n\" }}{{- \"Today Date: \" + date_string + \"\\n\\n\" }}"
              "{{- system_message }}{{- \"<|eot_id|>\" }}") if date else ""
    return ("{{- bos_token }}" + system + "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
            "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}")


def turns(begin, user, answer, opens):
    """A template of plain turns; user, answer: around `said`."""
    def text(form):
        before, after = form.split("SAID")
        said = "message['content']" + (" | trim" if "TRIM" in after else "")
        after = after.replace("TRIM", "")
        end = " + eos_token" if "EOS" in after else ""
        return f"{{{{ '{before}' + {said}{end} + '{after.replace('EOS', '')}' }}}}"
    return (begin + "{% for message in messages %}{% if message['role'] == 'user' %}" + text(user) + "{% else %}"
            + text(answer) + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '" + opens + "' }}{% endif %}")


def deepseek(opens):
    return ("{{bos_token}}{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + "
            "message['content']}}{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}"
            "{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + "
            "'<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt %}{{'<｜Assistant｜>" + opens
            + "'}}{% endif %}")


FIXED = "{%- set date_string = \"26 Jul 2024\" %}"
TODAY = ("{%- if strftime_now is defined %}{%- set date_string = strftime_now(\"%d %b %Y\") %}{%- else %}" + FIXED
         + "{%- endif %}")
LLAMA = ["<bos>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML, THINK = ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"]
PHI = ["<|user|>", "<|assistant|>", "<|end|>"]
DEEPSEEK = ["<bos>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
QWEN25 = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
FORMS = {  # tokens, the token that ends a turn, family, template
    "Llama 3": (LLAMA, "<|eot_id|>", "llama", llama("")),
    "Llama 3.1": (LLAMA, "<|eot_id|>", "llama", llama(FIXED)),
    "Llama 3.2": (LLAMA, "<|eot_id|>", "llama", llama(TODAY)),
    "Qwen2": (CHATML, "<|im_end|>", "qwen2", chatml("You are a helpful assistant.")),
    "Qwen2.5": (CHATML, "<|im_end|>", "qwen2", SYSTEM_FIRST + "{%- else %}{{- '<|im_start|>system\\n" + QWEN25
                + "<|im_end|>\\n' }}{%- endif %}" + CHATML_TURNS),
    "SmolLM2": (CHATML, "<|im_end|>", "llama",
                chatml("You are a helpful AI assistant named SmolLM, trained by Hugging Face")),
    "Qwen3": (CHATML + THINK, "<|im_end|>", "qwen3", SYSTEM_FIRST + "{%- endif %}" + CHATML_WITHOUT_THOUGHTS),
    "Qwen3 Thinking": (CHATML + THINK, "<|im_end|>", "qwen3", SYSTEM_FIRST + "{%- endif %}"
                       + CHATML_WITHOUT_THOUGHTS.replace("assistant\\n'", "assistant\\n<think>\\n'")),
    "Gemma": (["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>", "gemma2",
              turns("{{ bos_token }}", "<start_of_turn>user\\nSAIDTRIM<end_of_turn>\\n",
                    "<start_of_turn>model\\nSAIDTRIM<end_of_turn>\\n", "<start_of_turn>model\\n")),
    "Phi-3": (PHI + ["<0x0A>"], "<|end|>", "phi3",
              turns("", "<|user|>\\nSAID<|end|>\\n", "<|assistant|>\\nSAID<|end|>\\n", "<|assistant|>\\n")),
    "Phi-4": (CHATML + ["<|im_sep|>"], "<|im_end|>", "phi3",
              turns("", "<|im_start|>user<|im_sep|>SAID<|im_end|>", "<|im_start|>assistant<|im_sep|>SAID<|im_end|>",
                    "<|im_start|>assistant<|im_sep|>")),
    "Phi-4-mini": (PHI, "<|end|>", "phi3",
                   turns("", "<|user|>SAID<|end|>", "<|assistant|>SAID<|end|>", "<|assistant|>")),
    # Phi-4-reasoning and Phi-4-mini-reasoning: a message of the system, in one text or in two.
    "Phi-4, system": (CHATML + ["<|im_sep|>"], "<|im_end|>", "phi3",
                      turns("{{ '<|im_start|>system<|im_sep|>Think first.<|im_end|>' }}",
                            "<|im_start|>user<|im_sep|>SAID<|im_end|>", "<|im_start|>assistant<|im_sep|>SAID<|im_end|>",
                            "<|im_start|>assistant<|im_sep|>")),
    "Phi-4-mini, system": (PHI + ["<|system|>"], "<|end|>", "phi3",
                           turns("{{ '<|system|>Your name is Phi.' }}{{ '<|end|>' }}", "<|user|>SAID<|end|>",
                                 "<|assistant|>SAID<|end|>", "<|assistant|>")),
    # The vocabulary of Llama 3, as fine-tunes keep it, with other turns.
    "ChatML, Llama's tokens": (LLAMA + CHATML, "<|im_end|>", "llama", "{{ bos_token }}" + CHATML_TURNS),
    # Qwen3-Instruct-2507: the tokens of thoughts, which turns keep.
    "Qwen3 Instruct": (CHATML + THINK, "<|im_end|>", "qwen3", SYSTEM_FIRST + "{%- endif %}" + CHATML_TURNS),
    # Ministral: between Mistral's two.
    "Ministral": (["<bos>", "[INST]", "[/INST]", "</s>"], "</s>", "mistral",
                  turns("{{- bos_token }}", "[INST]SAID[/INST]", " SAIDTRIMEOS", "")),
    "Mistral 7B v0.3": (["<bos>", "[INST]", "[/INST]", "</s>", "<0x0A>"], "</s>", "mistral",
                        turns("{{- bos_token }}", "[INST] SAID[/INST]", " SAIDTRIMEOS", "")),
    "Mistral Nemo": (["<bos>", "[INST]", "[/INST]", "</s>"], "</s>", "mistral",
                     turns("{{- bos_token }}", "[INST]SAID[/INST]", "SAIDEOS", "")),
    "OLMo 2": (CHATML + ["<|endoftext|>"], "<|endoftext|>", "olmo2",
               turns("{{ bos_token }}", "<|user|>\\nSAID\\n", "<|assistant|>\\nSAIDEOS\\n", "<|assistant|>\\n")),
    "DeepSeek-R1": (DEEPSEEK + THINK, "<｜end▁of▁sentence｜>", "qwen2", deepseek("<think>\\n")),
    "DeepSeek-R1, first": (DEEPSEEK + THINK, "<｜end▁of▁sentence｜>", "qwen2", deepseek("")),
}
SAID = [("Hi", "Yes.", "And?"), (" Hi \n", " Yes. \n", "\tAnd? "), ("\u3000Hi\u00a0", "\nYes.\u2028", "And?\n"), ("Hi", "<think>\nWell\n</think>\n\nYes.", "And?")]


def main():
    forms = []
    for name, (tokens, end, family, template) in FORMS.items():
        begin = "<bos>" if "<bos>" in tokens else "<|endoftext|>" if family == "olmo2" else ""
        chats = []
        for said in SAID:
            if "<think>" in said[1] and "<think>" not in tokens:
                continue
            messages = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
            rendered, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True,
                                                bos_token=begin, eos_token=end)
            chats.append({"said": said, "text": rendered[0]})
        forms.append({"name": name, "tokens": tokens, "end": end, "family": family, "template": template,
                      "chats": chats})
    out = {"transformers": transformers.__version__, "today": datetime.datetime.now().strftime("%d %b %Y"),
           "forms": forms}
    path = pathlib.Path(__file__).parent / "chats.json"
    path.write_text(json.dumps(out, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
