"""A teacher beside its student before step 1: vocabularies, tokens, sizes, and a student that is its teacher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.job.found_teacher import FoundTeacher, find_teacher
from gossamer.job.teacher_facts import check_same, compared, facts_of
from gossamer.job.teaching import _FirstLook, _ready
from gossamer.loss.dpo import ANSWERS, REFERENCE, Dpo
from gossamer.loss.kl import Kl
from gossamer.loss.taid import Taid
from gossamer.model.forward_adapter import caller_of
from gossamer.model.precision import precision_of
from gossamer.run.teacher import LOG_PROBABILITIES, WORDS, CourseState, TaughtLoss, Teacher
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput


class Model(nn.Module):
    def __init__(self, words: int, width: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


class Words:
    def __init__(self, vocabulary: int, shift: int = 0) -> None:
        self.vocabulary, self.shift = vocabulary, shift

    def encode(self, text: str) -> list[int]:
        return [(ord(one) + self.shift) % self.vocabulary for one in text]


class Tokens(nn.Module):
    """A language model whose words depend on the token and its position."""

    def __init__(self, words: int = 16) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(16, 8), nn.Embedding(9, 8)
        self.head = nn.Linear(8, words)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        at = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        found: Tensor = self.head(self.embed(input_ids) + self.places(at))
        return found


class Deaf(Tokens):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def ready(teacher: nn.Module, student: nn.Module, rows: dict[str, Tensor], side: Any = "none") -> Teacher:
    config = RunConfig.model_validate({"model": {"hf": "llama", "side": side}, "data": {"factory": "a:b"}})
    train = SimpleNamespace(together=1, batch=lambda _: rows)
    parts: Any = SimpleNamespace(device=torch.device("cpu"), train=train, config=config)
    engine: Any = SimpleNamespace(
        caller=caller_of(student, rows), precision=precision_of("fp32"), device=torch.device("cpu")
    )
    return _ready(teacher, parts, engine)


def taught(teacher: Teacher | None, width: int, **settings: Any) -> TaughtLoss:
    inner = Kl(teacher="x", **settings)
    return TaughtLoss(inner=inner, teacher=teacher, course=CourseState(now=inner.first(), total=3), width=width)


IDS = torch.arange(9)[None]
ROWS = {"input_ids": IDS, "labels": IDS}


def look(teacher: Model, student: Model, theirs: Any, ours: Any, positions: int | None = None) -> Any:
    config = SimpleNamespace(data=SimpleNamespace(sequence=64))
    parts: Any = SimpleNamespace(outline=student, words=ours, config=config)
    return compared(facts_of(FoundTeacher(module=teacher, tokenizer=theirs, positions=positions)), parts)


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


def test_a_teacher_without_a_tokenizer_is_told() -> None:
    _, (remark,) = look(Model(50, 9), Model(50), None, Words(50))
    assert remark.level == "warning" and "it has no tokenizer, so that nothing has checked" in remark.message
    assert look(Model(50, 9), Model(50), None, None) == (None, [])  # no text, and no tokens to compare


def test_a_broken_tokenizer_is_no_missing_one(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path)
    found = find_teacher(str(tmp_path))
    assert found.tokenizer is None and found.without == f"{tmp_path} has no tokenizer"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"the teacher's tokenizer cannot be read: .*not JSON"):
        find_teacher(str(tmp_path))


def test_a_teacher_is_told_where_documents_begin() -> None:
    """One that is not would give the words of other positions: that is refused, as it is of a student."""
    rows = {**ROWS, "position_ids": torch.arange(9)[None] % 4}
    assert ready(Tokens(), Tokens(), rows).width == 16
    with pytest.raises(BadInput, match=r"a forward of the teacher with a parameter position_ids.*Deaf"):
        ready(Deaf(), Tokens(), rows)
    assert ready(Deaf(), Tokens(), ROWS).width == ready(Deaf(), Deaf(), rows).width == 16


def test_a_pooled_side_network_is_refused_with_labels_of_tokens() -> None:
    pooled = {"unipt": {"tokens": "mean"}}
    with pytest.raises(BadInput, match="no token may see a later one"):
        ready(Tokens(), Tokens(), ROWS, pooled)
    assert ready(Model(5), Model(5), {"x": torch.zeros(2, 4), "labels": torch.zeros(2).long()}, pooled).width == 5


def test_widths_are_compared_where_only_words_of_the_teacher_are_kept() -> None:
    """A kept teacher has no logits any more, and a wider student would be taught all the same."""
    kept = {WORDS: torch.zeros(1, 9, 1).int(), LOG_PROBABILITIES: torch.full((1, 9, 2), -0.7)}
    loss = taught(None, 16, top_k=1)
    assert loss(Tokens(16)(IDS), {**ROWS, **kept}).item() > 0
    for words in (12, 20):
        with pytest.raises(BadInput, match=f"the vocabulary of the student, {words} logits, got one with 16"):
            loss(Tokens(words)(IDS), {**ROWS, **kept})


def test_a_student_with_terms_of_its_own_is_refused() -> None:
    """Its logits alone would train it, without them (the balance of experts)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=16, num_key_value_heads=1, num_local_experts=4, **sizes)
    student, teacher = MixtralForCausalLM(config), ready(Tokens(), Tokens(), ROWS)
    loss = taught(teacher, teacher.width)
    assert _FirstLook(loss)(student(**ROWS), ROWS).item() > 0
    balanced = student(**ROWS, output_router_logits=True)
    answers = {ANSWERS: IDS.repeat(2, 1), REFERENCE: torch.zeros(2)}
    for judge, rows in ((loss, ROWS), (Dpo(), answers)):
        with pytest.raises(BadInput, match="an output with aux_loss"):
            judge(balanced, rows)
    plain = student(**ROWS)
    for change in (0.01, -0.01):
        with pytest.raises(BadInput, match="where the cross-entropy is"):
            _FirstLook(loss)({"loss": plain.loss + change, "logits": plain.logits}, ROWS)


def test_a_course_begins_where_another_loss_ended() -> None:
    """A run of kl has no course, though its t is 1; taid goes on with its own."""
    kl, taid = Kl(teacher="x"), Taid(teacher="x")
    before = CourseState(now=kl.first(), total=9, teacher="a").meta()
    state = CourseState(now=taid.first(), total=9, teacher="a")
    assert "its course begins here, at t = 0.4" in state.restore(before) and state.now == taid.first()
    state.now = taid.after(taid.after(taid.first(), loss=2.0, done=1, total=9), loss=1.0, done=2, total=9)
    again = CourseState(now=taid.first(), total=9, teacher="b")
    assert again.restore(state.meta()) == "the teacher is another one than before" and again.now == state.now
    assert CourseState(now=kl.first(), total=9).restore({}) == ""


def test_ranks_with_different_teachers_are_told() -> None:
    """An address that means this host means another one to each host; ranks that compute no loss have none."""
    check_same([0.0, 7.0, 7.0], "tcp://localhost:1")
    with pytest.raises(BadInput, match="000000000007 on rank 1, 000000000009 on rank 2 at tcp://localhost:1"):
        check_same([0.0, 7.0, 9.0], "tcp://localhost:1")


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
