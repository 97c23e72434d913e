import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gossamer.data.tokenizer import Tokenizer, names, parse_tokenizer
from gossamer.spec.errors import BadInput

kit = pytest.importorskip("tokenizers")

TEXTS = [
    "plain ascii, twice: plain ascii, twice\r\n\ttabs  and   runs of spaces   ",
    "caf\u00e9 na\u00efve \u4e16\u754c \U0001f578\u200d\U0001f577 e\u0301 \ufb01ne",
    "it says <|endoftext|> and </s> and [SEP] in plain text",
    "\u00a0",
    "   ",
    "\x00\x01\x7f",
    "x",
]


def made(written: str, cache: Path) -> Tokenizer:
    return parse_tokenizer(written).make(lambda: TEXTS * 20, identity="test", cache=cache)


def word_piece(folder: Path) -> str:
    """Lower-cases, normalizes, splits at spaces, knows hardly a word: as lossy as tokenizers get."""
    vocabulary = {piece: n for n, piece in enumerate(["[UNK]", "[SEP]", "plain", "as", "##cii", "in", "##e", "x"])}
    inner = kit.Tokenizer(kit.models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.normalizer = kit.normalizers.BertNormalizer()
    inner.pre_tokenizer = kit.pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens(["[SEP]"])
    inner.post_processor = kit.processors.BertProcessing(("[SEP]", 1), ("[SEP]", 1))
    return _saved(inner, folder / "wordpiece", {"sep_token": "[SEP]"})


def unigram(folder: Path) -> str:
    """As SentencePiece makes them: a mark for spaces, one put in front, NFKC."""
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("\u2581", -2.0),
        *((c, -4.0) for c in "abcdefilnopstwx,:"),
        ("\u2581plain", -3),
    ]
    inner = kit.Tokenizer(kit.models.Unigram(pieces, unk_id=0))
    inner.normalizer = kit.normalizers.NFKC()
    inner.pre_tokenizer = kit.pre_tokenizers.Metaspace()
    inner.decoder = kit.decoders.Metaspace()
    inner.add_special_tokens(["</s>"])
    return _saved(inner, folder / "unigram", {"eos_token": {"content": "</s>", "special": True}})


def _saved(inner: object, folder: Path, config: dict[str, object]) -> str:
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


KINDS: dict[str, Callable[[Path], str]] = {
    "byte": lambda folder: "byte",
    "bpe": lambda folder: "bpe:300",
    "wordpiece": word_piece,
    "unigram": unigram,
}
EXACT = ("byte", "bpe")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(kind: str, tmp_path: Path) -> Tokenizer:
    return made(KINDS[kind](tmp_path), tmp_path)


def test_every_recipe_is_among_these() -> None:
    assert set(names()) == {"byte", "bpe", "hf"}


def test_lengths_add_up_to_the_bytes(tokenizer: Tokenizer) -> None:
    for text, spans in zip(TEXTS, tokenizer.spans(TEXTS), strict=True):
        assert spans.ids.shape == spans.lengths.shape
        assert (spans.lengths >= 0).all()
        assert int(spans.lengths.sum()) + spans.rest == len(text.encode())
        assert np.array_equal(spans.ids, tokenizer.encode(text))


def test_ids_are_below_the_vocabulary_and_no_separator_arises_from_text(tokenizer: Tokenizer) -> None:
    ids = np.concatenate([tokenizer.encode(text) for text in TEXTS])
    assert ids.min() >= 0 and ids.max() < tokenizer.vocabulary
    assert tokenizer.separator < tokenizer.vocabulary


@pytest.mark.parametrize("written", ["byte", "bpe:300"])
def test_text_that_spells_the_separator_is_text(written: str, tmp_path: Path) -> None:
    tokenizer = made(written, tmp_path)
    assert tokenizer.separator not in tokenizer.encode(TEXTS[2])


def test_text_comes_back(tokenizer: Tokenizer, kind: str) -> None:
    for text in TEXTS:
        back = tokenizer.decode([*tokenizer.encode(text), tokenizer.separator])
        assert back == text if kind in EXACT else isinstance(back, str)


def test_saved_files_load_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written = tokenizer.save(tmp_path / "out")
    assert all(file.is_file() for file in written)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    assert theirs.eos_token_id == tokenizer.separator
    for text in (TEXTS[0], TEXTS[1], TEXTS[6]):
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist()
    again = made(f"hf:{tmp_path / 'out'}", tmp_path)
    assert again.vocabulary == tokenizer.vocabulary and again.separator == tokenizer.separator


def test_byte_ids_are_the_bytes(tmp_path: Path) -> None:
    text = "".join(chr(c) for c in range(0x250)) + TEXTS[1]
    byte = made("byte", tmp_path)
    assert byte.encode(text).tolist() == list(text.encode()) and byte.vocabulary == 257
    byte.save(tmp_path / "out")
    inner = kit.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert inner.encode(text).ids == list(text.encode()) and inner.decode(list(text.encode())) == text


def test_bpe_is_trained_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made("bpe:300", tmp_path)
    assert 257 < first.vocabulary <= 300
    recipe = parse_tokenizer("bpe:300")
    kept = recipe.make(lambda: pytest.fail("trained again"), identity="test", cache=tmp_path)
    assert kept.fingerprint == first.fingerprint
    assert recipe.make(lambda: ["other text"] * 9, identity="other", cache=tmp_path).fingerprint != first.fingerprint
    elsewhere = made("bpe:300", tmp_path / "elsewhere")
    assert elsewhere.fingerprint == first.fingerprint  # training is a function of the text


def test_bytes_of_a_letter_in_several_tokens(tmp_path: Path) -> None:
    bpe = parse_tokenizer("bpe:257").make(lambda: ["a"], identity="tiny", cache=tmp_path)
    spans = bpe.spans(["a\u4e16b"])[0]
    assert spans.ids.size == 5 and spans.lengths.tolist() == [1, 3, 0, 0, 1]  # the letter counts where it first ends


def test_a_text_without_tokens_leaves_its_bytes_over(tmp_path: Path) -> None:
    spans = made(word_piece(tmp_path), tmp_path).spans(["   ", unicodedata.lookup("ZERO WIDTH SPACE")])
    assert spans[0].ids.size == 0 and spans[0].rest == 3


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("bite", "no tokenizer is called 'bite': did you mean 'byte'"),
        ("byte:7", "wanted byte without a value, got 'byte:7': write byte alone"),
        ("bpe", "wanted bpe:VOCABULARY"),
        ("bpe:", "wanted bpe:VOCABULARY"),
        ("bpe:many", "wanted a whole number, got 'many'"),
        ("bpe:256", "at least 257 tokens"),
        ("bpe:-1", "at least 257 tokens"),
    ],
)
def test_badly_written(written: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        parse_tokenizer(written)
    assert caught.value.key.startswith("data.tokenizer")


def test_hf_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="which does not exist"):
        made(f"hf:{tmp_path}/none", tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="is not JSON"):
        made(f"hf:{broken}", tmp_path)
    (broken / "tokenizer.json").write_text('{"added_tokens": [{"content": "</s>"}], "model": {}}')
    with pytest.raises(BadInput, match="intact"):
        made(f"hf:{broken}", tmp_path)
    mute = tmp_path / "mute"
    _saved(kit.Tokenizer(kit.models.WordLevel({"a": 0, "b": 1}, unk_token="a")), mute, {})
    with pytest.raises(BadInput, match="no eos_token and no sep_token"):
        made(f"hf:{mute}", tmp_path)
    (mute / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(BadInput, match="eos_token '<end>', which is no special token"):
        made(f"hf:{mute}", tmp_path)


def test_a_damaged_cached_bpe_is_named(tmp_path: Path) -> None:
    made("bpe:300", tmp_path)
    (file,) = (tmp_path / "tokenizers").glob("*.json")
    file.write_text("{")
    with pytest.raises(BadInput, match=f"delete {file}"):
        made("bpe:300", tmp_path)
