"""Validation sets of their own source: all of their text, in the tokens and the template of the training corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data.chats import chat_file, tokenizer_folder, turns
from gossamer.data import Corpus, open_corpus, open_validation
from gossamer.data.mixed_sequences import MixedSequences
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import Written


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    chat_file(tmp_path / "train.jsonl", *(turns(f"why {n}", f"so {n}") for n in range(20)))
    chat_file(tmp_path / "asked.jsonl", *(turns(f"who {n}", f"she {n}") for n in range(7)))
    (tmp_path / "notes.txt").write_text("some words of a text " * 40)
    words = tokenizer_folder(tmp_path / "words", "zephyr")
    source = f"chat:{tmp_path}/train.jsonl"
    return open_corpus(source=source, tokenizer=f"hf:{words}", sequence=128, pack=False, cache=tmp_path / "cache")


def opened(folder: Path, corpus: Corpus, source: Written, **given: Any) -> Corpus:
    settings = {"pack": False, "isolate": False, "cache": folder / "cache", **given}
    return open_validation("books", source, corpus, **settings)


def test_of_conversations_every_answer_counts(tmp_path: Path, corpus: Corpus) -> None:
    found = opened(tmp_path, corpus, f"chat:{tmp_path}/asked.jsonl")
    assert len(found.train) == 7 and len(found.validation) == 0
    assert found.train.bytes_of(range(7)) == 7 * len("she 0")
    assert found.tokenizer.fingerprint == corpus.tokenizer.fingerprint
    assert found.train.fingerprint != corpus.validation.fingerprint


def test_a_mixture_is_one_set_in_proportion(tmp_path: Path, corpus: Corpus) -> None:
    sources = {"chat": f"chat:{tmp_path}/asked.jsonl", "text": f"text:{tmp_path}/notes.txt"}
    source = {"mixture": {"sources": sources, "weights": {"chat": 1, "text": 1}}}
    found = opened(tmp_path, corpus, source)
    assert isinstance(found.train, MixedSequences)
    alone = [opened(tmp_path, corpus, one).train for one in sources.values()]
    assert len(found.train) == sum(map(len, alone)) and len(alone[1]) > 1
    assert {found.train.is_marked(int(n)) for n in found.train.first(6)} == {True, False}


def test_a_set_is_told_by_its_name(tmp_path: Path, corpus: Corpus) -> None:
    inner = {"sources": {"text": f"text:{tmp_path}/nowhere.txt"}, "weights": {"text": 1}}
    for source in (f"text:{tmp_path}/nowhere.txt", {"mixture": inner}):
        with pytest.raises(BadInput, match=r"nowhere\.txt") as error:
            opened(tmp_path, corpus, source)
        assert error.value.key.startswith("data.validation.books")
    (tmp_path / "short.txt").write_text("few")
    with pytest.raises(BadInput, match=r"validation set books: .*128 tokens") as error:
        opened(tmp_path, corpus, f"text:{tmp_path}/short.txt", pack=True)
    assert error.value.key == "data.validation.books"
