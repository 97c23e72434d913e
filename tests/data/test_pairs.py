"""Preference pairs as training data: two neighbors per pair, whatever the form of a line, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.chats import tokenizer_folder, turns
from gossamer.data import IGNORED, Corpus, decode_preview, open_corpus
from gossamer.data.source import parse_source
from gossamer.spec.errors import BadInput


def pair(number: int, long: int = 1) -> dict[str, Any]:
    return {"prompt": f"q{number}", "chosen": f"good {number} " * long, "rejected": f"bad {number}"}


def opened(folder: Path, *records: dict[str, Any], **settings: Any) -> Corpus:
    folder.mkdir(exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    words = tokenizer_folder(folder / "words", "zephyr")
    given = {"sequence": 64, "validation": 0, **settings}
    return open_corpus(source=f"pairs:{folder}/pairs.jsonl", tokenizer=f"hf:{words}", cache=folder / "cache", **given)


def test_the_answers_of_a_pair_are_neighbors_in_any_batch(tmp_path: Path) -> None:
    train = opened(tmp_path, *map(pair, range(7))).train
    assert len(train) == 14 and train.together == 2
    found = train.order(seed=5)(np.arange(28)).reshape(-1, 2)
    assert (found[:, 0] % 2 == 0).all() and (found[:, 1] == found[:, 0] + 1).all()
    assert sorted(found[:7].reshape(-1).tolist()) == list(range(14)) and found[:7].tolist() != found[7:].tolist()


def test_the_last_answer_alone_counts(tmp_path: Path) -> None:
    said = turns("one", "two", "three")
    corpus = opened(tmp_path, {"prompt": said, "chosen": "yes", "rejected": "no"}, sequence=128)
    batch = corpus.train.batch([0, 1])
    assert set(batch) == {"input_ids", "attention_mask", "loss.answers"}
    learnt = [
        corpus.tokenizer.spell([token for token in row if token != IGNORED]) for row in batch["loss.answers"].tolist()
    ]
    assert learnt == ["yes</s>", "no</s>"]
    shown = decode_preview(corpus.train, corpus.tokenizer, seed=0, count=2)
    assert [one.learnt for one in shown] == [("yes</s>",), ("no</s>",)] and corpus.train.bytes_of([0, 1]) == 0


def test_forms_of_a_line_mean_the_same(tmp_path: Path) -> None:
    asked, good, bad = turns("q")[0], {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
    records = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [asked], "chosen": [good], "rejected": [bad]},
        {"chosen": [asked, good], "rejected": [asked, bad]},
        {"prompt": "q", "chosen": [asked, good], "rejected": [asked, bad]},
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = [(one.messages, one.rejected) for one in parse_source(f"pairs:{tmp_path}/all.jsonl").documents()]
    assert len(found) == 4 and len(set(found)) == 1


def test_a_pair_that_does_not_fit_is_left_out_and_told(tmp_path: Path) -> None:
    corpus = opened(tmp_path, pair(1), pair(2, long=20), pair(3))
    assert len(corpus.train) == 4
    assert "1 of 3 pairs is left out: an answer of it ends behind data.sequence, 64 tokens" in corpus.remark


def test_the_holdout_keeps_pairs_together(tmp_path: Path) -> None:
    corpus = opened(tmp_path, *map(pair, range(30)), pair(3), validation=0.3)
    assert len(corpus.validation) % 2 == 0 and len(corpus.train) + len(corpus.validation) == 60
    assert corpus.validation.first(7).tolist() == list(range(6))
    assert "1 conversation repeats another" in corpus.remark


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, "wanted a prompt at {file}:1, got none"),
        ({"prompt": "q", "chosen": "a"}, "wanted prompt, chosen and rejected at {file}:1"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "wanted two different answers at {file}:1"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "got an empty message"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": ["t"]}, "got the field 'tools', which is not read"),
        ({"prompt": turns("q", "a"), "chosen": "a", "rejected": "b"}, "two answers in a row"),
        ({"chosen": turns("q", "a"), "rejected": turns("r", "b")}, "wanted one prompt for both answers at {file}:1"),
        ({"chosen": turns("q", "a", "r"), "rejected": turns("q", "a", "r")}, "wanted an answer (role assistant)"),
        ({"prompt": "z", "chosen": turns("q", "a"), "rejected": turns("q", "b")}, "the prompt at {file}:1 is not in"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        opened(tmp_path, line)
    assert said.format(file=tmp_path / "pairs.jsonl") in str(caught.value) and caught.value.key == "data.source"


def test_answers_that_the_template_makes_equal_are_refused(tmp_path: Path) -> None:
    """A template that strips leaves nothing to prefer: the loss would have no gradient, and say nothing."""
    template = tmp_path / "strips.jinja"
    template.write_text("{% for one in messages %}{{ one.role[0] }}: {{ one.content | trim }}\n{% endfor %}")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": " a"}) + "\n")
    source = {"pairs": {"files": f"{tmp_path}/pairs.jsonl", "template": str(template)}}
    with pytest.raises(BadInput, match=r"pairs\.jsonl:1, got two of which the chat template makes the same text"):
        open_corpus(source=source, tokenizer="byte", sequence=64, validation=0, cache=tmp_path / "cache")


@pytest.mark.parametrize("pairs", ["pairs:there are none.jsonl", {"hub": {"dataset": "owner/name", "read": "pairs"}}])
def test_pairs_are_no_part_of_a_mixture_and_nothing_is_read_to_see_it(pairs: str | dict[str, Any]) -> None:
    source = {"mixture": {"sources": {"b": "text:nor this.txt", "a": pairs}, "weights": {"a": 1, "b": 1}}}
    with pytest.raises(BadInput, match="got preference pairs in a") as told:
        open_corpus(source=source)
    assert told.value.key == "data.source.mixture.sources.a"
