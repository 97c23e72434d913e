"""Weighted mixtures: each source has its part of the tokens at any time, and nothing but the index says whose turn."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.chats import chat_file, tokenizer_folder, turns
from gossamer.data import IGNORED, Corpus, decode_preview, open_corpus
from gossamer.data.mixed_sequences import MixedOrder, MixedSequences, nested_shares
from gossamer.data.ordering import SampleOrder
from gossamer.spec.errors import BadInput


def mixture(folder: Path, weights: dict[str, Any], **settings: Any) -> Corpus:
    choose = random.Random(3)
    said = [turns("why " * choose.randint(1, 9), "so " * choose.randint(1, 9)) for _ in range(60)]
    chat_file(folder / "chats.jsonl", *said)
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"some words of text {number} " * 60)
    sources = {"chat": f"chat:{folder}/chats.jsonl", "text": f"text:{folder}/*.txt", "more": f"text:{folder}/0.txt"}
    given = {"sequence": 128, "pack": False, "validation": 0.2, **settings}
    return open_corpus(
        source={"mixture": {"sources": {name: sources[name] for name in weights}, "weights": weights}},
        tokenizer=f"hf:{tokenizer_folder(folder / 'words', 'zephyr')}",
        cache=folder / "cache",
        **given,
    )


def test_every_source_has_its_part_to_within_rounding() -> None:
    parts = [Fraction(1, 7), Fraction(3, 5), Fraction(1, 1000), 1 - Fraction(1, 7) - Fraction(3, 5) - Fraction(1, 1000)]
    turn = MixedOrder(nested_shares(parts), (), np.zeros(1, np.int64)).turn
    taken = [0] * 4
    for index in range(20_000):
        source, before = turn(index)
        assert before == taken[source]  # its own turns are counted without a gap
        taken[source] += 1
        assert all(abs(count - (index + 1) * part) <= 2 for count, part in zip(taken, parts, strict=True))
    assert taken[2] == 20


def test_a_turn_far_away_needs_no_turn_before_it() -> None:
    order = MixedOrder(
        nested_shares([Fraction(1, 3), Fraction(2, 3)]), (SampleOrder(1, 5), SampleOrder(2, 7)), np.array([0, 5, 12])
    )
    many = order(np.arange(300))
    assert [int(order(n)) for n in (0, 7, 299)] == [int(many[n]) for n in (0, 7, 299)]
    for border, size, part in ((0, 5, 1), (5, 7, 2)):  # every epoch of a source visits each of its sequences once
        own = many[(many >= border) & (many < border + size)]
        assert own.size == 100 * part
        assert all(len(set(own[n : n + size].tolist())) == size for n in range(0, own.size - size, size))
    assert 0 <= int(order(10**12)) < 12


@pytest.mark.parametrize("pack", [True, False])
def test_tokens_are_shared_as_the_weights_say(tmp_path: Path, pack: bool) -> None:
    train = mixture(tmp_path, {"chat": 1, "text": 3}, pack=pack).train
    assert isinstance(train, MixedSequences)
    for start in (0, 5000):
        rows = train.order(seed=4)(np.arange(start, start + 3000))
        tokens = {True: 0, False: 0}
        for row in rows.tolist():
            tokens[train.is_marked(row)] += train.tokens_of(row)
        assert tokens[True] / sum(tokens.values()) == pytest.approx(0.25, abs=0.004)


@pytest.mark.parametrize("settings", [{}, {"pack": True}, {"pack": True, "isolate": True}])
def test_a_batch_is_of_both_kinds(tmp_path: Path, settings: dict[str, Any]) -> None:
    train = mixture(tmp_path, {"chat": 1, "text": 1}, **settings).train
    rows = train.order(seed=0)(np.arange(16))
    batch = train.batch(rows)
    assert all(value.shape == (16, 128) for value in batch.values())
    assert set(batch) - {"input_ids", "labels"} == {"position_ids" if settings.get("isolate") else "attention_mask"}
    for n, row in enumerate(rows.tolist()):
        alone = train.batch([row])
        assert all((batch[name][n] == values[0]).all() for name, values in alone.items())
        assert int((alone["labels"] != IGNORED).sum()) == int(train.labels_of([row])[0])
    assert train.bytes_of(rows) == sum(train.bytes_of([row]) for row in rows.tolist())
    assert train.labels_of(rows).sum() == (batch["labels"] != IGNORED).sum()


def test_an_evaluation_takes_both_kinds(tmp_path: Path) -> None:
    held_out = mixture(tmp_path, {"chat": 1, "text": 1}).validation
    first = held_out.first(8)
    assert {held_out.is_marked(row) for row in first.tolist()} == {True, False} and len(set(first.tolist())) == 8
    assert sorted(held_out.first(10**4).tolist()) == list(range(len(held_out)))


def test_a_preview_has_sequences_of_both(tmp_path: Path) -> None:
    corpus = mixture(tmp_path, {"chat": 1, "text": 1})
    shown = decode_preview(corpus.train, corpus.tokenizer, seed=0, count=4)
    assert {bool(one.learnt) for one in shown} == {True, False}
    assert b"some words of text" in corpus.text("train")


def test_weights_and_sources_are_in_the_fingerprint(tmp_path: Path) -> None:
    found = [
        mixture(tmp_path, weights).fingerprint
        for weights in ({"chat": 1, "text": 1}, {"chat": 1, "text": 2}, {"chat": 1, "more": 1}, {"chat": 1, "text": 1})
    ]
    assert len(set(found)) == 3 and found[0] == found[3]


@pytest.mark.parametrize(
    ("sources", "weights", "said"),
    [
        ({"a": "stdlib", "b": "sotu"}, {"a": 0, "b": 0}, "wanted a weight above 0 for the source 'a', got 0"),
        ({"a": "stdlib", "b": "sotu"}, {"a": 1, "b": -1}, "wanted a weight above 0 for the source 'b', got -1"),
        ({"a": "stdlib", "b": "sotu"}, {"a": 1}, "wanted a weight above 0 for the source 'b', got none"),
        ({"a": "stdlib"}, {"a": 1, "aa": 1}, "no source is called 'aa': did you mean 'a'?"),
        ({}, {}, "wanted sources by name, got none"),
        ({"a": "stdlb"}, {"a": 1}, "data.source.mixture.sources.a: no source is called 'stdlb'"),
        ({"a": {"mixture": {"sources": {"b": "stdlib"}, "weights": {"b": 1}}}}, {"a": 1}, "got the mixture 'a'"),
    ],
)
def test_what_is_no_mixture_is_refused(sources: dict[str, Any], weights: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        open_corpus(source={"mixture": {"sources": sources, "weights": weights}})
    assert said in str(caught.value) and caught.value.key.startswith("data.source.mixture")
