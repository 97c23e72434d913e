from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from gossamer.data.tokenizer import Tokenizer, parse_tokenizer
from gossamer.data.tokenizer._bytes import Bytes
from gossamer.data.tokenizer._fast import Fast
from gossamer.model.text_stream import TextStream
from gossamer.model.token_sampling import TokenSampling
from gossamer.spec.errors import BadInput

kit = pytest.importorskip("tokenizers")
TEXT = "na\u00efve \u4e16\u754c, \U0001f578\u200d\U0001f577  two  spaces\n and so on"


def bpe(folder: Path) -> Tokenizer:
    return parse_tokenizer("bpe:300").make(lambda: [TEXT] * 20, identity="stream", cache=folder)


def word_piece(_: Path) -> Tokenizer:
    pieces = {piece: n for n, piece in enumerate(["[UNK]", "[SEP]", "two", "spaces", "and", "so", "o", "##n", ","])}
    inner = kit.Tokenizer(kit.models.WordPiece(pieces, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = kit.pre_tokenizers.BertPreTokenizer(), kit.decoders.WordPiece()
    return Fast(vocabulary=9, separator=1, fingerprint="", inner=inner)


def sentence_piece(_: Path) -> Tokenizer:
    """As Llama 2 has it: a mark for spaces, bytes for letters that the vocabulary lacks."""
    pieces = ["<unk>", "</s>", "\u2581", *(f"<0x{n:02X}>" for n in range(256)), *"abcdefghijklmnopqrstuvwxyz,"]
    inner = kit.Tokenizer(
        kit.models.BPE({piece: n for n, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = kit.normalizers.Sequence(
        [kit.normalizers.Prepend("\u2581"), kit.normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = kit.decoders.Sequence(
        [
            kit.decoders.Replace("\u2581", " "),
            kit.decoders.ByteFallback(),
            kit.decoders.Fuse(),
            kit.decoders.Strip(" ", 1, 0),
        ]
    )
    return Fast(vocabulary=len(pieces), separator=1, fingerprint="", inner=inner)


MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "byte": lambda _: Bytes(),
    "bpe": bpe,
    "word_piece": word_piece,
    "sentence_piece": sentence_piece,
}


def streamed(words: Tokenizer, given: Sequence[int], ids: Sequence[int]) -> list[str]:
    stream = TextStream(words.decode, given)
    return [*(stream.push(token) for token in ids), stream.end()]


@pytest.mark.parametrize("cut", [0, 1, 5])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_pieces_are_the_text_and_no_character_is_torn(kind: str, cut: int, tmp_path: Path) -> None:
    words = MAKERS[kind](tmp_path)
    ids = [int(one) for one in words.encode(TEXT)]
    pieces = streamed(words, ids[:cut], ids[cut:])
    assert "".join(pieces) == words.decode(ids)[len(words.decode(ids[:cut])) :]
    assert not any("\ufffd" in piece for piece in pieces) and sum(map(bool, pieces)) > 4


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_any_tokens_at_all_give_their_text(kind: str, tmp_path: Path) -> None:
    words = MAKERS[kind](tmp_path)
    for seed in range(20):
        ids = torch.randint(0, words.vocabulary, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        assert "".join(streamed(words, [], ids)) == words.decode(ids)


def test_a_character_that_stays_incomplete_is_marked_at_the_end() -> None:
    assert streamed(Bytes(), [], [65, 0xE4, 0xBD]) == ["A", "", "", "\ufffd"]


def test_the_fewest_likeliest_tokens_that_make_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    for top_p, kept in ((0.4, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.96, {0, 1, 2, 3})):
        sampling = TokenSampling(temperature=1.0, top_p=top_p)
        assert {sampling.draw(logits, generator) for _ in range(300)} == kept
    narrow = TokenSampling(temperature=1.0, top_k=2, top_p=0.6)  # of two tokens the first has 0.625
    assert {narrow.draw(logits, generator) for _ in range(300)} == {0}


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        TokenSampling(**wrong)  # type: ignore[arg-type]
