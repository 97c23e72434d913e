"""Runs with a teacher: the same training on any number of ranks, over a stop, in stages and with sharded states."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from gossamer.job.teaching import _first_look
from gossamer.spec.errors import BadInput
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("teacher"), 16)


def saved(folder: Path, words: int) -> str:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, num_key_value_heads=1, **sizes))
    model.lm_head.weight.data.mul_(20)  # an opinion
    model.save_pretrained(folder)
    return str(folder)


def sections(written: dict[str, Any], plan: dict[str, Any] | None = None, **train: Any) -> dict[str, dict[str, Any]]:
    return {"plan": {"exchange": "dense", **(plan or {})}, "train": {"loss": written, **train}}


def taid(teacher: str, **settings: Any) -> dict[str, Any]:
    return {"taid": {"teacher": teacher, "alpha": 0.9, "beta": 0.5, "tile_tokens": 5, "label_weight": 0.3, **settings}}


def train(pool: Pool, ranks: int, folder: Path, given: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    more = {"steps": 6, "kind": "headed", "values": True, **more}
    return pool.run("run.jobs:train", ranks, folder=str(folder), sections=given, **more)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def course(folder: Path) -> dict[str, Any]:
    """Return the course in the newest checkpoint."""
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    return dict(open_checkpoint(newest.parent, int(newest.name.removeprefix("step-"))).meta["distillation"])


def losses(folder: Path) -> list[float]:
    return [one["loss"] for one in records(folder, "step")]


def test_unequal_ranks_train_as_one_does(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """Rows of unequal labels, adaptive t, tiles that cut rows, micro-batches: equal losses, weights and t."""
    found = {}
    for ranks in (1, 3):
        runs = train(pool, ranks, tmp_path / str(ranks), sections(taid(teacher), accumulate=2), until=4)
        assert all(one["digest"] == runs[0]["digest"] for one in runs)
        found[ranks] = torch.tensor(runs[0]["values"])
    assert torch.allclose(found[1], found[3], rtol=1e-5, atol=1e-6)
    assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
    one, three = course(tmp_path / "1"), course(tmp_path / "3")
    assert one["teacher"] == three["teacher"] != f"{0:012x}"
    assert 0.81 < one["t"] < 1 and three["t"] == pytest.approx(one["t"], rel=1e-5)  # beyond the line, which is at 0.8
    assert one["momentum"] != 0 and three["momentum"] == pytest.approx(one["momentum"], rel=1e-4)
    said = [one["message"] for one in records(tmp_path / "1", "event")]
    assert any("run beside the student" in one for one in said) and not any("held whole" in one for one in said)


@pytest.mark.nightly
def test_a_resume_goes_on_with_the_course(pool: Pool, teacher: str, tmp_path: Path) -> None:
    whole = train(pool, 2, tmp_path / "whole", sections(taid(teacher)))
    train(pool, 2, tmp_path / "part", sections(taid(teacher)), until=3)
    stopped = course(tmp_path / "part")
    assert 0.7 < stopped["t"] < 1 and stopped["loss_before"] is not None  # beyond the line, which is at 0.7
    part = train(pool, 2, tmp_path / "part", sections(taid(teacher)), resume=True)
    assert part[0]["digest"] == whole[0]["digest"]
    assert course(tmp_path / "part") == course(tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"mesh": {"pipe": 2}, "cuts": ["embed", "layers.1"]}),
        (2, {"sharding": "zero1"}),
        (2, {"sharding": "zero3"}),
    ],
    ids=["stages", "zero1", "zero3"],
)
def test_stages_and_shards_train_as_one_process_does(
    pool: Pool, teacher: str, tmp_path: Path, ranks: int, plan: dict[str, Any]
) -> None:
    train(pool, 1, tmp_path / "one", sections(taid(teacher)))
    train(pool, ranks, tmp_path / "other", sections(taid(teacher), plan), values=False)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert course(tmp_path / "other")["t"] == pytest.approx(course(tmp_path / "one")["t"], rel=1e-6)


@pytest.mark.nightly
def test_a_teacher_that_is_kept_is_the_teacher(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """With all words but one kept, the losses are those of the teacher itself; a resume reads the file."""
    for name, k in (("live", 0), ("kept", 15)):
        train(pool, 2, tmp_path / name, sections(taid(teacher, top_k=k, temperature=2.0)))
    assert losses(tmp_path / "kept") == pytest.approx(losses(tmp_path / "live"), rel=1e-4)
    train(pool, 3, tmp_path / "kept", sections(taid(teacher, top_k=15, temperature=2.0)), resume=True, steps=7)
    first, again = (one["message"] for one in records(tmp_path / "kept", "event") if "probable" in one["message"])
    assert "computed once, in teacher-" in first and ", from teacher-" in again
    (file,) = (tmp_path / "kept" / "run").glob("teacher-*.safetensors")
    assert not list(file.parent.glob("*.part"))


def test_a_teacher_on_some_ranks_is_the_teacher_on_all(pool: Pool, tmp_path: Path, teacher: str) -> None:
    """Two of three ranks have it, not the one that writes the records; all train on the words that these send."""
    found = {}
    for name, ranks in (("all", ()), ("some", (1, 2))):
        given = {"kl": {"teacher": teacher, "top_k": 4, "teacher_ranks": ranks}}
        found[name] = train(pool, 3, tmp_path / name, sections(given))
    assert torch.equal(torch.tensor(found["all"][0]["values"]), torch.tensor(found["some"][0]["values"]))
    assert losses(tmp_path / "some") == losses(tmp_path / "all")
    assert course(tmp_path / "some")["teacher"] == course(tmp_path / "all")["teacher"] != f"{0:012x}"
    for name in found:
        said = [one["message"] for one in records(tmp_path / name, "event")]
        assert any("run once over the training data" in one for one in said) == (name == "all"), said


@pytest.mark.nightly
def test_ranks_that_share_a_last_stage_count_each_token_once(pool: Pool, tmp_path: Path, teacher: str) -> None:
    written = {"kl": {"teacher": teacher, "top_k": 4}}
    plan = {"mesh": {"pipe": 2}, "stage_ranks": [[0], [1, 2]], "cuts": ["embed", "layers.1"]}
    train(pool, 1, tmp_path / "one", sections(written, accumulate=2))
    train(pool, 3, tmp_path / "three", sections(written, plan, accumulate=2), values=False)
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.nightly
def test_few_words_bound_the_divergence_from_below(pool: Pool, teacher: str, tmp_path: Path) -> None:
    found = []
    for k in (0, 8, 2):
        train(pool, 1, tmp_path / str(k), sections({"kl": {"teacher": teacher, "top_k": k}}), steps=1)
        found.append(losses(tmp_path / str(k))[0])
    assert found[0] > found[1] > found[2] > 0


@pytest.mark.nightly
def test_evaluations_report_the_labels_loss(pool: Pool, teacher: str, tmp_path: Path) -> None:
    """That of a run that does not move is the plain one's."""
    still = {"optimizer": {"sgd": {"lr": 1e-12}}}
    train(pool, 1, tmp_path / "taught", sections({"kl": {"teacher": teacher}}, **still), steps=1)
    train(pool, 1, tmp_path / "plain", sections("next_token", **still), steps=1)  # type: ignore[arg-type]
    ours, plain = (records(tmp_path / one, "evaluation")[-1]["loss"] for one in ("taught", "plain"))
    assert ours == pytest.approx(plain, rel=1e-6) and losses(tmp_path / "taught")[0] != losses(tmp_path / "plain")[0]


def test_another_vocabulary_is_refused(pool: Pool, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 24)
    with pytest.raises(AssertionError, match=r"a teacher with the vocabulary of the student"):
        train(pool, 1, tmp_path, sections({"kl": {"teacher": other}}))


@dataclass
class LookedAt:
    """A student whose first look gives a loss."""

    value: float
    module: nn.Module
    objective: Any = None

    def loss_of_copies(self, rows: Any, *, step: int, key: int) -> Tensor:
        return torch.tensor(self.value)


def test_a_student_that_masks_what_its_teacher_expects_is_refused() -> None:
    batches = SimpleNamespace(together=1, batch=lambda _: {"labels": torch.ones(1, 2)})
    parts: Any = SimpleNamespace(train=batches, device=torch.device("cpu"))
    taught: Any = SimpleNamespace(weight=lambda _: 2)
    look: Any = lambda value: _first_look(LookedAt(value, nn.Linear(1, 1)), parts, taught)  # type: ignore[arg-type] # noqa: E731
    assert look(0.5) == [] and len(look(0.0)) == 1
    with pytest.raises(BadInput, match="an infinite divergence on the first rows"):
        look(math.inf)


@pytest.mark.parametrize(
    ("written", "plan", "train_", "said"),
    [
        ({"kl": {}}, {}, {}, "a teacher for kl"),
        ({"kl": {"teacher": "nowhere"}}, {}, {}, "'nowhere', which does not exist"),
        ({"taid": {"teacher": "x"}}, {"sync": {"local_sgd": {"sync_every": 2}}}, {}, "plan.sync every_step with taid"),
        ({"taid": {"teacher": "x"}}, {}, {"seconds": 5}, "train.steps alone with taid"),
        ({"kl": {"teacher": "x", "top_k": 2, "teacher_ranks": [1]}}, {}, {}, "teacher_ranks of those that compute the"),
        ({"kl": {"teacher": "x", "teacher_ranks": [0]}}, {}, {}, "top_k with teacher_ranks"),
        ({"kl": {"teacher": "x"}}, {"savers": ["cut_cross_entropy"]}, {}, "computes its logits in tiles"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    pool: Pool, tmp_path: Path, written: Any, plan: dict[str, Any], train_: dict[str, Any], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        train(pool, 1, tmp_path, sections(written, plan, **train_))
