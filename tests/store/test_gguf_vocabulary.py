from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.data.tokenizer.byte import Bytes
from gossamer.spec.errors import BadInput
from gossamer.store.gguf_vocabulary import CONTROL, UNUSED, byte_letter, read_vocabulary, with_pre_tokenizer


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Bytes().save(tmp_path)}


def changed(files: dict[str, bytes], **keys: Any) -> dict[str, bytes]:
    return {**files, "tokenizer.json": json.dumps({**json.loads(files["tokenizer.json"]), **keys}).encode()}


def merged(files: dict[str, bytes], **options: Any) -> dict[str, bytes]:
    """The byte tokenizer with a merge, so that where text is cut matters."""
    model = json.loads(files["tokenizer.json"])["model"]
    model["vocab"]["ab"] = 257
    return changed(files, model={**model, "merges": ["a b"], **options})


def test_bytes_and_a_separator(files: dict[str, bytes]) -> None:
    found = read_vocabulary(files, size=260, bos=None, eos=(256,))
    assert found.tokens[:256] == tuple(byte_letter(byte) for byte in range(256))
    assert (found.tokens[256], found.types[256]) == ("<|endoftext|>", CONTROL)
    assert found.tokens[257] == "[PAD257]" and found.types[257:] == (UNUSED,) * 3
    assert found.special == {"eos": 256, "padding": 256, "bos": 256} and not found.add_bos
    assert (found.pre, found.merges) == ("gpt-2", ())


def test_names_of_pre_tokenizers(files: dict[str, bytes]) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    sequence = {"type": "Sequence", "pretokenizers": [digits, level]}
    for written, name in ((level, "gpt-2"), (sequence, "smollm")):
        found = read_vocabulary(changed(merged(files), pre_tokenizer=written), size=260, bos=None, eos=())
        assert (found.pre, found.merges) == (name, ("a b",))
    cut = json.loads(with_pre_tokenizer(changed(files, pre_tokenizer=level)["tokenizer.json"], "smollm"))
    assert cut["pre_tokenizer"] == sequence
    assert with_pre_tokenizer(files["tokenizer.json"], "gpt-2") == files["tokenizer.json"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"decoder": {"type": "WordPiece"}}, "WordPiece"),
        ({"post_processor": {"type": "BertProcessing"}}, "BertProcessing"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ],
)
def test_what_llama_cpp_would_do_otherwise_is_refused_by_name(
    files: dict[str, bytes], keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        read_vocabulary(changed(merged(files), **keys), size=260, bos=None, eos=())


def test_options_of_the_model_are_refused_by_name(files: dict[str, bytes]) -> None:
    for options in ({"byte_fallback": True}, {"dropout": 0.1}, {"end_of_word_suffix": "</w>"}, {"ignore_merges": True}):
        with pytest.raises(BadInput, match=next(iter(options))):
            read_vocabulary(merged(files, **options), size=260, bos=None, eos=())


def test_a_vocabulary_larger_than_the_models_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(BadInput, match="token ids below 200, the model's vocabulary, got a tokenizer with the id 256"):
        read_vocabulary(files, size=200, bos=None, eos=())


def test_a_token_before_every_text_is_the_bos(files: dict[str, bytes]) -> None:
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    given = changed(files, post_processor={"type": "TemplateProcessing", "single": single})
    found = read_vocabulary(given, size=257, bos=7, eos=())
    assert found.add_bos and not found.add_eos and found.special["bos"] == 256


def test_the_chat_template_and_other_normal_forms(files: dict[str, bytes]) -> None:
    given = {**changed(files, normalizer={"type": "NFC"}), "chat_template.jinja": b"{{ messages }}"}
    found = read_vocabulary(given, size=257, bos=None, eos=(256, 3))
    assert found.fields()["tokenizer.chat_template"] == "{{ messages }}"
    assert "NFC" in found.notes[0] and found.special["eot"] == 3
