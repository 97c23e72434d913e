"""Runs in which a pruned mixture of experts learns from what its experts were: values, ranks, a stop, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.loss import build
from gossamer.loss.expert_distillation import ExpertDistillation
from gossamer.loss.next_token import NextToken
from gossamer.spec.errors import BadInput
from pool import Pool
from prune.experts import of_transformers
from run.jobs import mixture
from run.test_distillation import course, losses, records, saved, sections, train

STAGES = {"mesh": {"pipe": 2}, "cuts": ["model.embed_tokens", "model.layers.1"]}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    mixture().save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def experts(teacher: str, weight: float = 1.0) -> dict[str, Any]:
    return {"expert_distillation": {"teacher": teacher, "expert_weight": weight}}


def run(pool: Pool, ranks: int, folder: Path, given: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return train(pool, ranks, folder, given, kind="mixture", **more)


def test_the_loss_is_that_of_the_labels_and_the_weighted_distance(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """The first losses at three weights lie on a line that begins at the loss of the labels; evaluations are its."""
    first, evaluated = {}, {}
    for weight in (0.0, 1.0, 3.0):
        written = experts(teacher, weight) if weight else "next_token"
        run(pool, 1, tmp_path / str(weight), sections(written, evaluate_every=1), steps=1)
        (first[weight],) = losses(tmp_path / str(weight))
        evaluated[weight] = records(tmp_path / str(weight), "evaluation")[0]["loss"]
    slope = first[1.0] - first[0.0]
    assert slope > 1e-3 and first[3.0] == pytest.approx(first[0.0] + 3 * slope, rel=1e-5)
    assert abs(evaluated[1.0] - evaluated[0.0]) < 0.1 * slope
    (said,) = (one["message"] for one in records(tmp_path / "3.0", "event") if "its experts are" in one["message"])
    assert "expert_weight 3 adds" in said and "would make both equal" in said


def test_two_ranks_compare_the_same_micro_batches_as_one(pool: Pool, teacher: str, tmp_path: Path) -> None:
    found = {}
    for ranks, accumulate, plan in ((1, 2, {}), (2, 1, {"sharding": "zero1"})):
        folder = tmp_path / str(ranks)
        found[ranks] = run(pool, ranks, folder, sections(experts(teacher), plan, accumulate=accumulate), steps=4)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    one, two = (torch.tensor(found[ranks][0]["values"]) for ranks in (1, 2))
    assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)


def test_a_resume_is_bit_equal_and_knows_its_teacher(pool: Pool, teacher: str, tmp_path: Path) -> None:
    whole = run(pool, 2, tmp_path / "whole", sections(experts(teacher)), steps=4)
    run(pool, 2, tmp_path / "part", sections(experts(teacher)), steps=4, until=2)
    assert course(tmp_path / "part")["teacher"] != f"{0:012x}"
    part = run(pool, 2, tmp_path / "part", sections(experts(teacher)), steps=4, resume=True)
    assert part[0]["digest"] == whole[0]["digest"] and losses(tmp_path / "part") == losses(tmp_path / "whole")
    other = tmp_path / "other"
    module = mixture()
    with torch.no_grad():
        module.get_parameter("model.norm.weight").add_(1)
    module.save_pretrained(other)  # type: ignore[operator]
    run(pool, 2, tmp_path / "part", sections(experts(str(other))), steps=5, resume=True)
    assert any("the teacher is another one" in one["message"] for one in records(tmp_path / "part", "event"))


def test_a_teacher_with_the_same_experts_is_warned_of(pool: Pool, tmp_path: Path) -> None:
    from run.jobs import pruned_mixture

    pruned_mixture().save_pretrained(tmp_path / "same")  # type: ignore[operator]
    run(pool, 1, tmp_path / "run", sections(experts(str(tmp_path / "same"))), steps=1)
    (one,) = (one for one in records(tmp_path / "run", "event") if "nothing to learn" in one["message"])
    assert one["level"] == "warning"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"plan": STAGES}, "a model in one stage, as the loss expert_distillation"),
        ({"plan": {"sharding": "zero3"}}, "parameters that are there all the time"),
        ({"plan": {"savers": ["recompute"]}}, "no savers"),
        ({"train": {"adversarial": {"epsilon": 0.1}}}, "no adversarial training"),
        ({"plan": {"sync": "just_one_byte"}, "train": {"optimizer": {"sgd": {"lr": 1e-4}}}}, "gradients of the loss"),
        ({"train": {"loss": "expert_distillation"}}, "a teacher for expert_distillation"),
    ],
)
def test_layouts_that_cannot_serve_it_are_refused(
    pool: Pool, teacher: str, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    whole = sections(experts(teacher), given.get("plan"))
    whole["train"] |= given.get("train", {})
    with pytest.raises(AssertionError, match=said):
        run(pool, 2, tmp_path, whole)


def test_models_without_these_experts_are_refused_by_name(pool: Pool, teacher: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wanted a mixture of experts, got a Headed without experts"):
        train(pool, 1, tmp_path / "a", sections(experts(saved(tmp_path / "llama", 16))), kind="headed")
    other = of_transformers("mixtral", vocab_size=16, max_position_embeddings=512, num_local_experts=3)
    other.save_pretrained(tmp_path / "three")  # type: ignore[operator]
    with pytest.raises(AssertionError, match="other ones: give the model that was pruned"):
        run(pool, 1, tmp_path / "b", sections(experts(str(tmp_path / "three"))))


def test_settings() -> None:
    assert build({"expert_distillation": {"teacher": "x"}}) == ExpertDistillation(teacher="x")
    with pytest.raises(BadInput, match="expert_weight"):
        build({"expert_distillation": {"expert_weight": 0}})
    rows = {"labels": torch.tensor([[1, 2, -100]])}
    logits = torch.randn(1, 3, 4)
    assert torch.equal(ExpertDistillation()(logits, rows), NextToken()(logits, rows))
