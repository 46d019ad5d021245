#!/usr/bin/env python3
"""Writes tests/reference/sentencepiece/: two small models of SentencePiece, and what its library makes of some texts with
them (cases.json).

    python3 -m venv venv
    venv/bin/pip install sentencepiece==0.2.3
    venv/bin/python tests/reference/make_sentencepiece.py
"""
import argparse
import io
import json
import pathlib

from make_tokenizers import TEXTS, TRAINING, large_text

try:
    import sentencepiece
except ImportError:  # --help must work all the same
    sentencepiece = None

# Without a table for NFKC, which would be 240 KB; "bpe" is as Llama 2's.
KINDS = {
    "bpe": dict(model_type="bpe", vocab_size=520, byte_fallback=True, split_digits=True, add_dummy_prefix=True,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True),
    "unigram": dict(model_type="unigram", vocab_size=200, user_defined_symbols=["<|a|>"], bos_id=-1, eos_id=1, unk_id=0),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    here = pathlib.Path(__file__).resolve().parent / "sentencepiece"
    here.mkdir(exist_ok=True)
    texts = [t for t in TEXTS if "\0" not in t] + [large_text(s, 200) for s in range(2, 5)]
    cases = {"texts": texts, "kinds": {}}
    for name, options in KINDS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TRAINING * 3), model_writer=model, normalization_rule_name="identity",
            character_coverage=0.99, num_threads=1, minloglevel=2, **options)
        (here / f"{name}.model").write_bytes(model.getvalue())
        known = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        ids = [known.encode(t) for t in texts]
        cases["kinds"][name] = {"vocab_size": known.vocab_size(), "bos": known.bos_id(), "ids": ids,
                                "decoded": [known.decode(i) for i in ids]}
    (here / "cases.json").write_text(json.dumps(cases, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
