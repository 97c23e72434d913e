"""Text in pieces: together what decoding at once gives, and no character torn."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.model.text_stream import pieces, until

TEXT = "für 猫 und 🐈‍⬛, na\u0308ive: 'ça' costs 5 €.  Two  spaces\n\n"


def byte(folder: Path) -> Tokenizer:
    return parse_tokenizer("byte").make(lambda: (), identity="", cache=folder)


def bpe(folder: Path) -> Tokenizer:
    return parse_tokenizer("bpe:300").make(lambda: [TEXT * 3], identity="x", cache=folder)


def sentencepiece(folder: Path) -> Tokenizer:
    """Words that begin with a mark, unknown characters as bytes: what Llama 2 has."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers

    from gossamer.data.tokenizer._fast import load

    words = ["<unk>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz,.:'0123"]
    words += ["\u2581Tw", "\u2581sp", "ces", "Tw"]
    made = Library(models.BPE({w: n for n, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    return load(made.to_str(), separator="</s>", key="")


@pytest.mark.parametrize("kind", [byte, bpe, sentencepiece])
def test_the_pieces_are_the_text(kind: object, tmp_path: Path) -> None:
    tokenizer: Tokenizer = kind(tmp_path)  # type: ignore[operator]
    ids = [int(i) for i in tokenizer.encode(TEXT)]
    for given in (0, 1, 2):
        found = list(pieces(tokenizer, ids[:given], ids[given:]))
        assert "".join(found) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:given])) :]
        assert not any("\ufffd" in piece for piece in found) and len(found) > 9
    some = random.Random(0).choices(range(tokenizer.vocabulary), k=400)  # what an untrained model writes
    if kind is not sentencepiece:  # its decoder reads a whole run of bytes as one, and a later byte spoils it
        assert "".join(pieces(tokenizer, [], some)) == tokenizer.decode(some)


def test_text_ends_before_its_stop() -> None:
    assert list(until(["a\n", "\nUs", "er: b", "c"], "\n\nUser:")) == ["a"]
    assert "".join(until(["a\n", "\nUs", "es"], "\n\nUser:")) == "a\n\nUses"
    assert "".join(until(["xxy"], "xy")) == "x"
    assert list(until(["a", "b"], "")) == ["a", "b"]
