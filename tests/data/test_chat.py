"""Conversations as training data: what is learnt, what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data.chats import CHATML, chat_file, tokenizer_folder, turns
from gossamer.data import IGNORED, Corpus, decode_preview, open_corpus, valid_labels
from gossamer.spec.errors import BadInput


def opened(folder: Path, kind: str, *conversations: list[dict[str, str]], **settings: Any) -> Corpus:
    given: dict[str, Any] = {"validation": 0, "sequence": 256, "pack": False, **settings}
    learn = given.pop("learn", "answers")
    file = chat_file(folder / "chats.jsonl", *conversations)
    words = tokenizer_folder(folder / "words", kind)
    source = {"chat": {"files": str(file), "learn": learn}}
    return open_corpus(source=source, tokenizer=f"hf:{words}", cache=folder / "cache", **given)


def marked(corpus: Corpus, index: int) -> str:
    """The text of a sequence with what is learnt in brackets."""
    batch = corpus.train.batch([index])
    text, inside = "", False
    size = corpus.train.tokens_of(index)
    for token, label in zip(batch["input_ids"][0, :size], batch["labels"][0, :size], strict=True):
        if (label != IGNORED) != inside:
            text, inside = text + ("]" if inside else "["), not inside
        assert label in (IGNORED, token)
        text += corpus.tokenizer.spell([int(token)])
    return text + "]" * inside


EXPECTED = {
    "chatml": "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    "[ Hello.\n<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[end<|im_end|>]\n",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello.<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[end<|eot_id|>]",
    "zephyr": "<|user|>\nHi </s>\n<|assistant|>\n[ Hello.\n</s>]\n<|user|>\nBye</s>\n<|assistant|>\n[end</s>]\n",
}


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_answers_and_the_ends_of_their_turns_are_learnt(tmp_path: Path, kind: str) -> None:
    """With a default system prompt, with texts that are stripped, without any mark of the answers in the template."""
    corpus = opened(tmp_path, kind, turns("Hi ", " Hello.\n", "Bye", "end"))
    assert marked(corpus, 0) == EXPECTED[kind]


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_marks_are_single_tokens_and_stand_for_no_bytes(tmp_path: Path, kind: str) -> None:
    corpus = opened(tmp_path, kind, turns("Hi", "caf\u00e9 \U0001f578", "ok?", "yes"))
    batch = corpus.train.batch([0])
    learnt = batch["labels"][batch["labels"] != IGNORED]
    assert len(learnt) == len("caf\u00e9 \U0001f578".encode()) + len("yes") + 2
    assert int((learnt >= 256).sum()) == 2
    assert corpus.train.bytes_of([0]) == len("caf\u00e9 \U0001f578".encode()) + len("yes")
    assert corpus.train.labels_of([0]).tolist() == [len(learnt)] == [int(valid_labels(batch["labels"]))]


@pytest.mark.parametrize("kind", sorted(EXPECTED))
@pytest.mark.parametrize("answer", ["end", "e", "s", "t", ">", "|"])
def test_an_answer_that_its_own_mark_spells_counts_once(tmp_path: Path, kind: str, answer: str) -> None:
    """Bytes are those of the answer, and nothing behind the mark is learnt, although the mark has its letters."""
    corpus = opened(tmp_path, kind, turns("Hi", answer))
    batch = corpus.train.batch([0])
    assert corpus.train.bytes_of([0]) == len(answer)
    assert int((batch["labels"] != IGNORED).sum()) == len(answer) + 1


def test_all_is_learnt_where_that_is_asked_for(tmp_path: Path) -> None:
    corpus = opened(tmp_path, "chatml", turns("Hi", "Hello"), learn="all")
    text = marked(corpus, 0)
    assert text.startswith("<|im_start|>[system\nYou are kind.") and "Hello<|im_end|>\n]" in text


def test_whole_conversations_share_a_sequence(tmp_path: Path) -> None:
    said = [turns("q" * n, "a" * n) for n in (3, 9, 20, 31, 40, 5)]
    alone = opened(tmp_path, "zephyr", *said)
    packed = opened(tmp_path, "zephyr", *said, pack=True, sequence=112)
    assert len(alone.train) == 6 and 0 < len(packed.train) < 6
    every = range(len(packed.train))
    ids, mask = packed.train.batch(every)["input_ids"], packed.train.batch(every)["attention_mask"]
    texts = [packed.tokenizer.spell(row[: int(size)]) for row, size in zip(ids, mask.sum(1), strict=True)]
    whole = [text for row in texts for text in row.split("<|user|>") if text]
    assert sorted(whole) == sorted(f"\n{'q' * n}</s>\n<|assistant|>\n{'a' * n}</s>\n" for n in (3, 9, 20, 31, 40, 5))
    assert packed.train.bytes_of(every) == alone.train.bytes_of(range(6)) == 108
    assert packed.train.labels_of(every).sum() == alone.train.labels_of(range(6)).sum() == 108 + 6


def test_isolated_conversations_restart_their_positions(tmp_path: Path) -> None:
    corpus = opened(tmp_path, "zephyr", turns("q", "a"), turns("qq", "aa"), pack=True, isolate=True)
    batch = corpus.train.batch([0])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    (size, other) = (len(f"<|user|>\n{q}s\n<|assistant|>\n{q}s\n") for q in ("qq", "q"))
    assert batch["position_ids"][0].tolist() == [*range(size), *range(other), *[0] * (256 - size - other)]


def test_what_is_too_long_is_cut_and_told(tmp_path: Path) -> None:
    said = [turns("q", "a" * 200), turns("q" * 200, "a"), turns("q", "a")]
    corpus = opened(tmp_path, "zephyr", *said, sequence=64)
    assert len(corpus.train) == 2
    assert "2 of 3 conversations are longer than data.sequence, 64 tokens, and are cut there" in corpus.remark
    assert "1 of these has no answer within 64 tokens and is left out" in corpus.remark
    assert (corpus.train.batch([0])["attention_mask"].sum(1) == 64).all()


def test_a_repeated_conversation_counts_once_and_is_told(tmp_path: Path) -> None:
    corpus = opened(tmp_path, "zephyr", turns("q", "a"), turns("r", "b"), turns("q", "a"))
    assert len(corpus.train) == 2
    assert "1 conversation repeats another and is left out (first: chats.jsonl#3, equal to chats.jsonl#1)" in (
        corpus.remark
    )


def test_the_holdout_takes_whole_conversations(tmp_path: Path) -> None:
    said = [turns(f"question {n}", f"answer {n}") for n in range(40)]
    corpus = opened(tmp_path, "zephyr", *said, validation=0.2)
    sides = [
        {corpus.tokenizer.spell(row) for row in split.batch(range(len(split)))["input_ids"]}
        for split in (corpus.train, corpus.validation)
    ]
    assert len(sides[0]) + len(sides[1]) == 40 and not sides[0] & sides[1] and len(sides[1]) > 2
    few = opened(tmp_path / "few", "zephyr", *said[:2], validation=0.01)
    assert (len(few.train), len(few.validation)) == (1, 1)
    with pytest.raises(BadInput, match="wanted 2 or more conversations, to hold one out, got 1 conversation"):
        opened(tmp_path / "one", "zephyr", said[0], validation=0.5)


def test_dialects_mean_the_same(tmp_path: Path) -> None:
    wanted = turns("Add 1 and 2.\n\nBriefly.", "3", system="Count.")
    share = [{"from": "human", "value": "Add 1 and 2.\n\nBriefly."}, {"from": "gpt", "value": "3"}]
    records = [
        {"messages": wanted},
        {"conversations": [{"from": "system", "value": "Count."}, *share]},
        {"conversations": share, "system": "Count."},
        {"messages": wanted[1:], "system": "Count.", "instruction": "of another field"},
        {"instruction": "Add 1 and 2.", "input": "Briefly.", "output": "3", "system": "Count."},
    ]
    from gossamer.data.source import parse_source

    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = [one.messages for one in parse_source(f"chat:{tmp_path}/all.jsonl").documents()]
    assert len(found) == 5 and len(set(found)) == 1
    assert [(one.role, one.content) for one in found[0]] == [(one["role"], one["content"]) for one in wanted]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "wanted one JSON object per line at {file}:2"),
        ({"text": "a"}, "wanted a conversation at {file}:2, one of messages"),
        ({"messages": []}, "wanted a list of messages {{role, content}} at {file}:2, got an empty list"),
        ({"messages": turns("q")}, "wanted an answer (role assistant) at {file}:2, got roles user"),
        ({"messages": turns("q", " ")}, "got an empty message"),
        ({"messages": turns("q", "a") + turns("q", "a")[1:]}, "got two answers in a row, message 3 (role assistant)"),
        ({"messages": turns("q", "a", "r", "b")[1:]}, "got message 1 (role assistant) at {file}:2: add the question"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "did you mean 'assistant'?"),
        ({"messages": [{"role": "user", "text": "a"}]}, "wanted {{role, content}} in message 1 at {file}:2"),
        ({"messages": [{"role": "user", "content": None}]}, "wanted a text as content of message 1 at {file}:2"),
        ({"messages": [*turns("q", "a"), *turns(system="s")]}, "got message 3 (role system)"),
        ({"messages": turns("q", "a"), "tools": [{"name": "f"}]}, "got the field 'tools', which is not read"),
        (
            {"messages": turns("q", "a"), "conversations": []},
            "wanted one conversation at {file}:2, got the fields messages",
        ),
        ({"messages": [turns("q")[0], {"role": "assistant", "content": "a", "thinking": "b"}]}, "the field 'thinking'"),
        (
            {"instruction": "a", "output": "b", "history": 5},
            "wanted history as a list of [question, answer] at {file}:2",
        ),
        ({"instruction": "a", "output": "b", "input": 0}, "wanted a text as input at {file}:2, got int"),
        ("[" * 100_000, "at {file}:2, got brackets that are nested too deep"),
        ('{"messages": ' + "1" * 5000 + "}", "at {file}:2, got a number with too many digits"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "wanted from system, user, assistant, human, gpt"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: Any, said: str) -> None:
    file = chat_file(tmp_path / "chats.jsonl", turns("q", "a"))
    with file.open("a") as stream:
        stream.write(line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(BadInput) as caught:
        open_corpus(source=f"chat:{file}", tokenizer="byte", cache=tmp_path / "cache")
    assert said.format(file=file) in str(caught.value) and caught.value.key == "data.source"


def test_a_tokenizer_without_a_template_is_refused_with_what_to_give(tmp_path: Path) -> None:
    file = chat_file(tmp_path / "chats.jsonl", turns("q", "a"), turns("r", "b"))
    with pytest.raises(
        BadInput, match=r"got a tokenizer without one: use the tokenizer of a chat model.*template: FILE"
    ):
        open_corpus(source=f"chat:{file}", tokenizer="byte", cache=tmp_path / "cache")
    (tmp_path / "own.jinja").write_text(CHATML)
    source = {"chat": {"files": str(file), "template": str(tmp_path / "own.jinja")}}
    corpus = open_corpus(source=source, tokenizer="byte", cache=tmp_path / "cache", validation=0)
    (shown, _) = decode_preview(corpus.train, corpus.tokenizer, seed=0)[:1] * 2
    assert "<|im_start|>user\nq<|im_end|>" in shown.text and shown.learnt == ("a<|im_end|>", "b<|im_end|>")
    assert shown.bytes == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages | length }}{{ messages[-1].content }}", "wanted a chat template that renders the start"),
        ("{% if messages | length > 2 %}{{ raise_exception('two turns at most') }}{% endif %}x", "two turns at most"),
        ("{{ strftime_now('%d') }}", "got one that asks for the date"),
        ("{{ messages[0].content }}", "got no letter of it"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(tmp_path: Path, template: str, said: str) -> None:
    file = chat_file(tmp_path / "chats.jsonl", turns("q", "a", "r", "b"))
    (tmp_path / "own.jinja").write_text(template)
    source = {"chat": {"files": str(file), "template": str(tmp_path / "own.jinja")}}
    with pytest.raises(BadInput) as caught:
        open_corpus(source=source, tokenizer="byte", cache=tmp_path / "cache", validation=0)
    assert said in str(caught.value)


def test_text_that_spells_a_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"message 2 \(role assistant\) at .*chats.jsonl:1, got '<\|im_end\|>'"):
        opened(tmp_path, "chatml", turns("q", "a<|im_end|>b"))


def test_the_template_and_what_is_learnt_are_in_the_fingerprint(tmp_path: Path) -> None:
    found = [opened(tmp_path, "zephyr", turns("q", "a"), learn=learn).fingerprint for learn in ("answers", "all")]
    again = opened(tmp_path, "zephyr", turns("q", "a"))
    assert found[0] == again.fingerprint != found[1]
    assert torch.equal(
        again.train.batch([0])["labels"], opened(tmp_path, "zephyr", turns("q", "a")).train.batch([0])["labels"]
    )


@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_the_kept_tokenizer_has_the_template_that_was_used(tmp_path: Path, kind: str) -> None:
    """That of the source, where it names one; transformers renders the same from the kept files."""
    from transformers import AutoTokenizer

    from gossamer.data.kept import read_tokenizer, tokenizer_files

    words = tokenizer_folder(tmp_path / "words", kind)
    (tmp_path / "other.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    file = chat_file(tmp_path / "chats.jsonl", turns("Hi", "Hello", "Bye", "end"))
    for template, named in (("other.jinja", {"template": str(tmp_path / "other.jinja")}), ("its own", {})):
        corpus = open_corpus(
            source={"chat": {"files": str(file), **named}},
            tokenizer=f"hf:{words}",
            cache=tmp_path / "cache",
            validation=0,
            sequence=256,
        )
        kept = tmp_path / "kept" / template
        kept.mkdir(parents=True)
        for name, content in tokenizer_files(corpus.tokenizer).items():
            (kept / name).write_bytes(content)
        found = read_tokenizer(kept)
        assert found.template == corpus.tokenizer.template and found.special == corpus.tokenizer.special
        assert found.template is not None
        rendered = found.template.render(turns("a", "b"), add_generation_prompt=False)
        assert ("user" in rendered) == (not named)
        theirs = AutoTokenizer.from_pretrained(kept).apply_chat_template(turns("a", "b"), tokenize=False)
        assert theirs == rendered
