"""`gossamer distill`: a run teaches another one, and the losses of both are said before and after."""

from __future__ import annotations

import pytest
import yaml
from safetensors import safe_open

from system.command import InThisProcess, Place, records

pytestmark = pytest.mark.nightly  # whole runs by the command line; their parts are tested in tests/run


def test_a_run_teaches_another(place: Place) -> None:
    place.good("train", place.config("large", train={"steps": 20, "batch": 8, "optimizer": {"adamw": {"lr": 0.01}}}))
    (teacher,) = place.runs()
    student = place.config("small", train={"steps": 4, "batch": 8, "loss": {"kl": {"temperature": 2.0}}})
    done = place.good("distill", teacher, "--to", student, "--by", "kl", "train.seed=3", "--json")
    data = done.last()
    run = place.runs()[-1]
    (one,) = data["distillation"]["losses"].values()
    assert one["teacher"] == pytest.approx(records(teacher, "evaluation")[-1]["loss"], rel=1e-4)
    assert one["student_after"] == records(run, "evaluation")[-1]["loss"] < one["student"]
    kept = yaml.safe_load((run / "run.yaml").read_text())["train"]["loss"]["kl"]
    assert kept["temperature"] == 2.0 and kept["teacher"] == str(teacher)


def test_hidden_states_are_learned_and_exports_have_no_maps(place: Place, inside: InThisProcess) -> None:
    place.good("train", place.config("large", train={"steps": 2, "batch": 8}))
    (teacher,) = place.runs()
    loss = {"hidden": {"output": {"jsd": {"beta": 0.3}}, "by": "mi_alpha"}}
    student = place.config("small", train={"steps": 2, "batch": 8, "loss": loss})
    place.good("distill", teacher, "--to", student, "--by", "hidden")
    run = place.runs()[-1]
    kept = yaml.safe_load((run / "run.yaml").read_text())["train"]["loss"]["hidden"]
    assert kept == {"output": {"jsd": {"beta": 0.3, "teacher": str(teacher)}}, "by": "mi_alpha"}
    assert any("hidden states of" in one["message"] for one in records(run, "event"))
    inside.good(place, "export", run, "out", "--to", "hf")
    with safe_open(str(place.folder / "out" / "model.safetensors"), "pt") as stored:
        names = list(stored.keys())
    assert names and not any("hidden_match" in name for name in names)


def test_what_is_no_teacher_and_no_method_is_named(place: Place, inside: InThisProcess) -> None:
    config = place.config("small")
    done = inside.run(place, "distill", "nowhere", "--to", config)
    assert done.code == 2 and "'nowhere', which does not exist" in done.err
    done = inside.run(place, "distill", "nowhere", "--to", config, "--by", "tiad")
    assert done.code == 2 and "did you mean 'taid'" in done.err
    done = inside.run(place, "distill", "nowhere", "--to", config, "train.loss.taid.teacher_ranks=[0]")
    assert done.code == 2 and "top_k with teacher_ranks" in done.err, "before a teacher is looked for"
