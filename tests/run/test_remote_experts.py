"""The experts of a served teacher: what one beside the student gives, bit for bit, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.prune import distances_from, expert_distances
from gossamer.run.remote_teacher.experts import RemoteExperts, layer_of
from gossamer.run.remote_teacher.frames import packed
from gossamer.run.remote_teacher.link import TeacherLink
from gossamer.run.remote_teacher.messages import Ready, Rows, Terms
from gossamer.run.remote_teacher.server import TeacherServer
from gossamer.spec.errors import BadInput, RunFailed
from pool import Pool
from prune.experts import Mixture
from run.jobs import mixture
from run.test_distillation import course, losses, records, sections
from run.test_divided_teacher import stage_of
from run.test_expert_distillation import experts, run
from run.test_remote_teacher import BATCH, CPU, SOON, named, place, pretending, serving, terms


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    mixture().save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


@pytest.fixture
def server(teacher: str) -> Iterator[TeacherServer]:
    with serving(teacher) as found:
        yield found


@pytest.mark.nightly
def test_a_student_learns_what_it_does_beside_its_teacher(
    pool: Pool, teacher: str, server: TeacherServer, tmp_path: Path
) -> None:
    """On two ranks, with micro-batches, over a stop and a resume: losses and weights, bit for bit."""
    given = {name: sections(experts(of), accumulate=2) for name, of in (("here", teacher), ("there", named(server)))}
    here = run(pool, 2, tmp_path / "here", given["here"], steps=4)
    run(pool, 2, tmp_path / "there", given["there"], steps=4, until=2)
    there = run(pool, 2, tmp_path / "there", given["there"], steps=4, resume=True)
    assert [one["digest"] for one in there] == [one["digest"] for one in here]
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    assert course(tmp_path / "there") == course(tmp_path / "here")
    said = [one["message"] for one in records(tmp_path / "there", "event")]
    assert any(
        "whose experts are asked at each micro-batch: " in one and "while the student waits" in one for one in said
    )


def experts_terms(student: nn.Module, **more: object) -> Terms:
    found = RemoteExperts(link=None, device=CPU)  # type: ignore[arg-type]
    with distances_from(student, found):
        pass
    return terms(experts=tuple(found.layers), dtype="float32", wants_head=False, **more)


class Listed(nn.Module):
    """Two blocks whose experts are lists, and weigh their outputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def learned(student: nn.Module, distance: Callable[[], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the distance of a forward, and the gradients of a loss of its outputs with it."""
    student.zero_grad()
    output, apart = student(BATCH["input_ids"]), distance()
    logits = output if isinstance(output, Tensor) else output.logits
    (logits.square().mean() + apart).backward()
    grads = {name: one.grad.clone() for name, one in student.named_parameters() if one.grad is not None}
    return float(apart.detach()), grads


@pytest.mark.parametrize("build", [Listed, mixture], ids=["listed", "fused"])
def test_distances_and_gradients_are_the_same(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    teacher = build()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for one in student.parameters():
            one.add_(torch.randn_like(one), alpha=0.1)
    with expert_distances(student, teacher.requires_grad_(False)) as distance:
        here = learned(student, distance)
    asked = experts_terms(student)
    with serving(teacher) as server:
        link = TeacherLink(*place(server), token="", patience=SOON)
        remote = RemoteExperts(link, CPU)
        link.agree(asked, {"input_ids": BATCH["input_ids"]})
        with distances_from(student, remote) as distance:
            for _ in range(2):
                there = learned(student, distance)
                assert there[0] == here[0] > 0 and there[1].keys() == here[1].keys()
                assert all(torch.equal(there[1][name], here[1][name]) for name in here[1])
        assert remote.sent_bytes > remote.came_bytes >= 2 * 18 * 2 * 8 * 4
        link.close()


def test_other_experts_are_refused_by_name(teacher: str, server: TeacherServer) -> None:
    def agreed(of: Terms) -> None:
        link = TeacherLink(*place(server), token="", patience=SOON)
        try:
            link.agree(of, {"input_ids": BATCH["input_ids"]})
        finally:
            link.close()

    asked = experts_terms(mixture())
    agreed(asked)
    (first, *_), other = asked.experts, layer_of("model.layers.0.mlp.experts", nn.Linear(3, 3))
    with pytest.raises(
        BadInput, match=r"experts of the student in model.layers.0.mlp.experts, got other ones: give the"
    ):
        agreed(asked.model_copy(update={"experts": (other,)}))
    with pytest.raises(BadInput, match="experts of the student in nowhere, got none"):
        agreed(asked.model_copy(update={"experts": (first.model_copy(update={"path": "nowhere"}),)}))
    with pytest.raises(BadInput, match="a student in float32, the type of its teacher on another host, got bfloat16"):
        agreed(asked.model_copy(update={"dtype": "bfloat16"}))
    stage = stage_of(teacher, 1, 2).served(CPU, None)
    with pytest.raises(BadInput, match="a teacher that is whole, for expert_distillation, got stage 1 of 2"):
        stage.reading(asked, {"input_ids": BATCH["input_ids"]})


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"inputs.0": torch.zeros(4, 8), "calls.0": torch.tensor([[4, 4]])}, "wanted rows for calls of 4 experts"),
        ({"inputs.0": torch.zeros(4, 8), "calls.0": torch.tensor([[0, 3]])}, "wanted rows for calls of 4 experts"),
        ({"inputs.0": torch.zeros(4, 8), "calls.0": torch.tensor([[0, 5], [0, -1]])}, "wanted rows for calls"),
        (
            {"inputs.0": torch.zeros(4, 8), "calls.0": torch.tensor([[0, 1 << 62]] * 3 + [[0, (1 << 62) + 4]])},
            "wanted rows for calls",  # the sum wraps to 4
        ),
        (
            {"inputs.0": torch.zeros(4, 8, dtype=torch.int32), "calls.0": torch.tensor([[0, 4]])},
            "wanted rows for calls",
        ),
        ({"inputs.0": torch.zeros(4, 7), "calls.0": torch.tensor([[0, 4]])}, "cannot compute this batch"),
        ({"inputs.0": torch.zeros(4, 8)}, "wanted inputs.0 with calls.0, got one of them"),
        ({}, "sent other tensors than outputs of experts"),
    ],
)
def test_questions_to_experts_are_checked(
    tensors: dict[str, Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Listed()
    monkeypatch.setattr("gossamer.run.remote_teacher.experts.packed", lambda asked, _: packed(asked, tensors))
    asked = experts_terms(model)
    with serving(copy.deepcopy(model)) as server:
        link = TeacherLink(*place(server), token="", patience=SOON)
        with distances_from(model, RemoteExperts(link, CPU)) as distance:
            link.agree(asked, {"input_ids": BATCH["input_ids"]})
            model(BATCH["input_ids"])
            with pytest.raises(RunFailed, match=said):
                distance()
        link.close()


def test_outputs_of_another_shape_are_refused() -> None:
    model = Listed()
    asked = experts_terms(model)
    ready = packed(Ready(width=0, hidden=0, compute="float32", names=()))
    with pretending(ready, packed(Rows(number=-1), {"outputs.0": torch.zeros(3, 8)})) as (host, port):
        link = TeacherLink(host, port, token="", patience=SOON)
        with distances_from(model, RemoteExperts(link, CPU)) as distance:
            link.agree(asked, {"input_ids": BATCH["input_ids"]})
            model(BATCH["input_ids"])
            with pytest.raises(RunFailed, match="sent other tensors than outputs of experts"):
                distance()
        link.close()


def test_what_experts_see_is_bounded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.run.remote_teacher.experts.MOST_ASKED_BYTES", 100)
    model = Listed()
    with distances_from(model, RemoteExperts(link=None, device=CPU)) as distance:  # type: ignore[arg-type]
        model(BATCH["input_ids"])
        with pytest.raises(BadInput, match="at most 100 B of what the experts see in a micro-batch"):
            distance()
