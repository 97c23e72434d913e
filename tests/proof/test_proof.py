"""Whether a layout is one process is found out before its first step, and what is not so is named; over gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pool import Pool

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from proof.faults import FAULTS

PROVE = "run.proof_jobs:prove"
STAGES = {"plan": {"mesh": {"pipe": 2}}, "train": {"accumulate": 4}}


def proved(pool: Pool, ranks: int, **given: Any) -> dict[str, Any]:
    """The record of a proof that went well; all ranks tell the same."""
    answers = pool.run(PROVE, ranks, **given)
    assert not any("refused" in one for one in answers), answers[0]
    *_, record = answers[0]["told"]
    assert {one["told"][-1]["message"].partition(" within")[0] for one in answers} == {
        record["message"].partition(" within")[0]
    }
    return record


def refused(pool: Pool, ranks: int, **given: Any) -> str:
    """What all ranks refuse it with."""
    answers = pool.run(PROVE, ranks, **given)
    said = {one.get("refused", f"nothing was refused: {one['told']}") for one in answers}
    assert len(said) == 1, said
    return said.pop()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_tensor_named_by_all_ranks(pool: Pool, name: str) -> None:
    fault = FAULTS[name]
    said = refused(pool, 2 * fault.replicas, fault=name, sections=STAGES)
    first = said.partition("to compute the gradients of one process, got ")[2].partition(" (")[0]
    assert fault.named in first or fault.named in said.partition("; then ")[2].partition(" in round")[0], said


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a gradient that is zero", "12 of 12 entries differ: all entries are zero, no gradient arrives"),
        ("one entry of a gradient off", "; entry [0, 5] is "),
        ("one entry of a gradient off", "1 of 144 entries differ"),
        ("a hook twice", "144 of 144 entries differ: they are 2 times what they should be"),
        ("a gradient transposed", "the gradient is transposed"),
        ("borders exchanged", "; entry ["),
    ],
)
def test_the_first_gradient_is_fetched_whole_and_looked_at(pool: Pool, fault: str, said: str) -> None:
    assert said in refused(pool, 2, fault=fault, sections=STAGES)


@pytest.mark.parametrize(
    ("ranks", "plan", "train", "layout"),
    [
        (2, {"mesh": {"pipe": 2}}, {}, "2 micro-batches: 2 stages = 1 process, "),
        (3, {"mesh": {"pipe": 3}, "pipeline_schedule": "gpipe"}, {}, "2 micro-batches: 3 stages = 1 process, "),
        (
            2,
            {"mesh": {"pipe": 2}, "pipeline_schedule": {"split_backward": {"inner": "gpipe"}}},
            {},
            "2 stages = 1 process, ",
        ),
        (2, {"mesh": {"pipe": 2}}, {"precision": "bf16"}, "2 stages = 1 process, "),
        (
            2,
            {"mesh": {"pipe": 2}, "activation_compression": {"codec": {"codec": "int8"}}},
            {},
            "2 stages = 1 process, ",
        ),
    ],
)
def test_an_honest_layout_is_one_process(
    pool: Pool, ranks: int, plan: dict[str, Any], train: dict[str, Any], layout: str
) -> None:
    record = proved(pool, ranks, sections={"plan": plan, "train": train})
    assert record["outcome"] == "equal"
    assert layout in record["message"]
    assert record["proved"] == record["tensors"] == 28
    assert record["within"] < 2e-6
    assert record["losses"][0] == pytest.approx(record["losses"][1], rel=1e-6)
    assert ("in bf16 within" in record["message"]) == ("precision" in train)
    assert ("not proved: activation compression" in record["message"]) == ("activation_compression" in plan)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"mesh": {"pipe": 2}, "pipeline_schedule": {"recompute": {"inner": "one_f_one_b"}}}),
        (3, {"mesh": {"pipe": 2}, "stage_ranks": [[0], [1, 2]]}),
    ],
    ids=["recompute", "two ranks of a stage"],
)
def test_an_honest_layout_of_a_model_without_state_is_one_process(pool: Pool, ranks: int, plan: dict[str, Any]) -> None:
    record = proved(pool, ranks, kind="opened", sections={"plan": plan})
    assert record["proved"] == 12


def test_statistics_that_ranks_of_a_stage_keep_for_themselves_change_no_gradient(pool: Pool) -> None:
    plan = {"mesh": {"pipe": 2}, "stage_ranks": [[0, 1], [2]], "units": ["norm"]}
    record = proved(pool, 3, kind="normed", sections={"plan": plan})
    assert record["outcome"] == "equal"


def test_buffers_that_a_forward_assigns_are_those_of_one_process(pool: Pool) -> None:
    record = proved(pool, 2, kind="assigned", sections=STAGES)
    assert record["outcome"] == "equal"


def test_what_has_no_gradient_is_not_proved_and_what_a_zero_hides_is(pool: Pool) -> None:
    record = proved(pool, 2, kind="opened", sections=STAGES)
    assert record["idle"] == ["never.bias", "never.weight"]
    assert "12 of 14 gradients" in record["message"] and "(2 not proved)" in record["message"]


def test_batch_norm_of_replicas_is_one_process(pool: Pool) -> None:
    record = proved(pool, 2, kind="normed")
    assert "4 micro-batches: 2 replicas = 1 process, " in record["message"]


def test_a_buffer_that_each_replica_has_of_its_own_batches_is_told_of(pool: Pool) -> None:
    (first, *_) = pool.run(PROVE, 2, kind="normed", sections={"train": {"prove": "always"}})
    warning, _ = first["told"]
    assert warning["level"] == "warning"
    assert (
        "running_mean is computed from the replica's own batches; no loss and no gradient of the proof depends on it"
        in warning["message"]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["statistics", "counted"])
def test_replicas_with_state_of_their_own_are_a_process_each(pool: Pool, kind: str, precision: str) -> None:
    (first, *_) = pool.run(PROVE, 2, kind=kind, sections={"train": {"prove": "always", "precision": precision}})
    warning, record = first["told"]
    assert warning["level"] == "warning"
    assert "so that together they are not one process: a loss of" in warning["message"]
    assert "2 replicas = 1 process each, " in record["message"]
    assert record["alone_s"] + record["divided_s"] <= record["seconds"], "no second counts twice"


def test_a_forward_that_writes_to_parameters_does_so_for_every_replica(pool: Pool) -> None:
    (first, *_) = pool.run(PROVE, 2, kind="renormed", sections={"train": {"prove": "always"}})
    warning, record = first["told"]
    assert "the forward writes to parameters, on each replica to its own copy" in warning["message"]
    assert "2 replicas = 1 process each, " in record["message"]


@pytest.mark.parametrize("kind", ["normed", "statistics"])
@pytest.mark.parametrize(("ranks", "pipe"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_layout_takes_more_than_24_microbatches_and_two_builds(
    pool: Pool, kind: str, ranks: int, pipe: int, precision: str
) -> None:
    sections = {"plan": {"mesh": {"pipe": pipe}}, "train": {"prove": "always", "precision": precision}}
    record = proved(pool, ranks, kind=kind, sections=sections)
    wanted = 4 * (ranks // pipe) * (3 if precision == "bf16" else 2)
    assert record["microbatches"] == wanted <= 24
    assert f"for {wanted} micro-batches of the whole model and 2 builds of it" in record["message"]


def test_unequal_replicas_are_one_process(pool: Pool) -> None:
    record = proved(pool, 2, kind="opened", sections={"plan": {"batch_fractions": [3, 1]}, "train": {"accumulate": 2}})
    assert "2 replicas = 1 process, " in record["message"]


@pytest.mark.parametrize(
    "sections",
    [{"train": {"accumulate": 1}}, {"train": {"prove": "never"}, "plan": {"mesh": {"pipe": 2}}}],
    ids=["replicas without buffers", "never"],
)
def test_where_it_is_not_asked_for_nothing_is_computed(pool: Pool, sections: dict[str, Any]) -> None:
    for one in pool.run(PROVE, 2, kind="opened", sections=sections):
        assert one["told"] == []


def test_always_proves_replicas_without_buffers_too(pool: Pool) -> None:
    record = proved(pool, 2, kind="opened", sections={"train": {"prove": "always"}})
    assert record["outcome"] == "equal"


def test_modules_of_different_values_are_named(pool: Pool) -> None:
    said = refused(pool, 2, kind="opened", seeds=True, sections=STAGES)
    assert "a different initial value of head.bias on rank 1" in said


def test_a_constructor_without_a_seed_is_named(pool: Pool) -> None:
    said = refused(pool, 2, factory="run.proof_jobs:unsteady", sections=STAGES)
    assert (
        "a constructor that gives the same numbers every time it runs, got different numbers for blocks.1.bias" in said
    )


def test_what_the_code_changes_outside_of_the_module_is_put_back(pool: Pool) -> None:
    for one in pool.run(PROVE, 2, kind="global", sections=STAGES):
        assert one["calls"] == 0


def test_labels_that_a_model_looks_at_are_left_as_they_are(pool: Pool) -> None:
    record = proved(pool, 2, kind="choosy", sections=STAGES)
    assert record["outcome"] == "equal"


def test_who_is_asked_to_stop_stops_all(pool: Pool) -> None:
    for one in pool.run(PROVE, 2, stop=True, sections=STAGES):
        assert one["interrupted"] == "stopped as asked in the proof, before the first step: nothing was trained"


def test_a_model_that_does_not_fit_is_told_of(pool: Pool) -> None:
    record = proved(pool, 2, free_bytes=20_000, sections=STAGES)
    assert record["outcome"] == "not proved"
    assert record["message"].startswith("one process takes ")
    assert "for parameters, gradients and the activations of a micro-batch" in record["message"]


def test_where_it_is_to_be_proved_always_that_is_refused(pool: Pool) -> None:
    said = refused(pool, 2, free_bytes=20_000, sections={**STAGES, "train": {"prove": "always"}})
    wanted = "a proof that 2 stages compute the gradients of one process"
    assert said.startswith(f"train.prove: wanted {wanted}, got no proof: one process takes")


def test_what_was_proved_is_not_proved_again(pool: Pool) -> None:
    (first, *_) = pool.run(PROVE, 2, times=2, sections=STAGES)
    assert [one["outcome"] for one in first["told"]] == ["equal", "kept"]
