"""A teacher beside its student before step 1: vocabularies, tokens, sizes, and a student that is its teacher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.job.teaching import FoundTeacher, compared, find_teacher
from gossamer.spec.errors import BadInput


class Model(nn.Module):
    def __init__(self, words: int, width: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, words)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


class Words:
    def __init__(self, vocabulary: int, shift: int = 0) -> None:
        self.vocabulary, self.shift = vocabulary, shift

    def encode(self, text: str) -> list[int]:
        return [(ord(one) + self.shift) % self.vocabulary for one in text]


def look(teacher: Model, student: Model, theirs: Any, ours: Any, positions: int | None = None) -> Any:
    config = SimpleNamespace(data=SimpleNamespace(sequence=64))
    parts: Any = SimpleNamespace(outline=student, words=ours, config=config)
    return compared(FoundTeacher(module=teacher, tokenizer=theirs, positions=positions), parts)


def test_equal_vocabularies_count_whole_and_a_larger_teacher_is_no_remark() -> None:
    assert look(Model(50, 9), Model(50), Words(50), Words(50)) == (None, [])


def test_padded_logits_are_left_out_where_the_tokens_are_the_same() -> None:
    words, (remark,) = look(Model(64, 9), Model(56), Words(50), Words(50))
    assert words == 50 and "those of the 50 tokens count" in remark.message


def test_another_vocabulary_is_refused() -> None:
    for theirs, ours in ((None, Words(50)), (Words(50), None), (Words(60), Words(60))):
        with pytest.raises(BadInput, match="a teacher with the vocabulary of the student, 56 logits, got one with 64"):
            look(Model(64), Model(56), theirs, ours)


def test_other_tokens_are_refused() -> None:
    with pytest.raises(BadInput, match="a teacher whose tokenizer gives the tokens of the data"):
        look(Model(50), Model(50), Words(50, 1), Words(50))


def test_a_teacher_that_sees_too_little_is_refused() -> None:
    with pytest.raises(BadInput, match="32"):
        look(Model(50), Model(50), Words(50), Words(50), positions=32)


def test_a_student_larger_than_its_teacher_is_warned_of() -> None:
    _, (remark,) = look(Model(50), Model(50, 9), Words(50), Words(50))
    assert remark.level == "warning" and "fewer than the student" in remark.message


def test_a_teacher_that_is_nowhere_is_named() -> None:
    with pytest.raises(BadInput, match="'nowhere', which does not exist"):
        find_teacher("nowhere")


@pytest.mark.nightly
def test_a_student_that_is_its_teacher_is_told(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=1, **sizes))
    model.save_pretrained(tmp_path / "teacher")
    ids = torch.arange(9).repeat(8, 1)
    data = [{"input_ids": one, "labels": one} for one in ids]
    train = {"steps": 1, "batch": 4, "loss": {"kl": {"teacher": str(tmp_path / "teacher")}}, "evaluate_every": 0}
    run = {"directory": str(tmp_path), "display": "quiet"}
    found = gossamer.train(model, data, {"train": train, "run": run})
    said = [one.message for one in found.run.records() if one.kind == "event"]
    assert any("the student gives its outputs already" in one for one in said)
    assert abs(float(found.losses[0][0] if found.losses.ndim > 1 else found.losses[0])) < 1e-6
