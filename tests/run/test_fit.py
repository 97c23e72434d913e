"""`gossamer train --dry-run`: what every rank takes, whether it fits, and what slow links cost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.job.dry_run import dry_run
from gossamer.job.fit import Change, Fit, Machine, ProcessBase
from gossamer.job.link_forecast import Cure, HostLinks, told_of_common, told_of_hosts
from gossamer.job.memory_forecast import MemoryForecast, RankMemory
from gossamer.launch.ssh_link import SshLink, measure_link
from gossamer.spec.config import RunConfig
from model.tiny import LLAMA

GIB = 1 << 30
NONE = dict.fromkeys(RankMemory.__dataclass_fields__, 0)
MODEL = {"hf": "llama", "config": LLAMA}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("To be, or not to be, that is the question. " * 400)
    return folder


def looked_at(
    text: Path, *, processes: int = 2, batch: int = 8, train: Mapping[str, Any] | None = None, **plan: Any
) -> dict[str, Any]:
    return dry_run(
        RunConfig.model_validate(
            {
                "model": MODEL,
                "data": {"source": f"text:{text}/*.txt", "sequence": 32, "cache": str(text / "cache")},
                "train": {"batch": batch, "steps": 4, "lr_schedule": "constant", **(train or {})},
                "machines": {"processes": processes},
                "plan": {"exchange": "dense", **plan},
            }
        )
    )


def parsed(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"GiB": 1024.0, "MiB": 1.0}[unit]


def test_a_run_that_fits_says_so_by_rank_and_category(text: Path) -> None:
    memory = looked_at(text)["memory"]
    assert memory["fits"] and memory["verdict"].startswith("fits") and "not_counted" not in memory
    ((name, rows),) = memory["by_rank"].items()
    assert name == "ranks 0 to 1" and {"parameters", "gradients", "optimizer", "activations", "process"} <= rows.keys()
    assert len(memory["peak_bytes"]) == 2 and "2 processes" not in memory["verdict"]


def forecast(text: Path, **plan: Any) -> MemoryForecast:
    """What `looked_at` finds, in bytes."""
    found: list[MemoryForecast] = []
    keep = Fit.told

    def told(self: Fit, changes: Any) -> dict[str, object]:
        found.append(self.forecast)
        return keep(self, changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fit, "told", told)
        looked_at(text, **plan)
    return found[0]


def test_a_companion_process_is_counted(text: Path) -> None:
    plain, late, ahead = (
        forecast(text, train={"adversarial": given}).ranks[0]
        for given in ({}, {"epsilon": 0.1, "delay": 1}, {"epsilon": 0.1, "delay": 1, "ahead": True})
    )
    assert plain.adversarial == 0 < late.adversarial == late.parameters
    assert ahead.activations == late.activations == 2 * plain.activations
    assert ahead.adversarial - late.adversarial > plain.activations + (256 << 20)


def test_an_update_process_is_counted(text: Path) -> None:
    limits = {"device": "64MB", "host": "64MB", "file": "1GB", "directory": str(text.parent)}
    threads, process = (
        forecast(text, processes=1, sharding={"tiers": {**limits, "update": update}}).ranks[0]
        for update in ("threads", "process")
    )
    assert threads.update_process == 0 and process.update_process > 128 << 20
    assert process.total - threads.total == process.update_process


def test_stages_with_tiers_hold_weights_of_their_own_part(text: Path) -> None:
    limits = {"device": "64MB", "host": "64MB", "file": "1GB", "directory": str(text.parent)}
    tiered = forecast(text, mesh={"pipe": 2}, sharding={"tiers": limits}).ranks
    plain = forecast(text, mesh={"pipe": 2}).ranks
    assert [one.parameters for one in tiered] == [one.parameters for one in plain]
    assert [one.activations for one in tiered] == [one.activations for one in plain]


def test_states_are_divided_where_they_are_sharded(text: Path) -> None:
    sharded = ("none", "zero1", "zero2", "zero3")
    whole, one, two, three = (forecast(text, sharding=name).ranks[0] for name in sharded)
    assert whole.optimizer == 2 * whole.gradients and whole.gradients <= whole.parameters
    assert one.optimizer == pytest.approx(whole.optimizer / 2, rel=0.05) and one.gradients == whole.gradients
    assert two.gradients == pytest.approx(whole.gradients / 2, rel=0.05)
    assert three.parameters < whole.parameters and three.optimizer == pytest.approx(whole.optimizer / 2, rel=0.05)
    assert 0 < one.allocator <= one.activations, "blocks as small as these do not go back to the system"


def test_stages_hold_their_own_part(text: Path) -> None:
    whole, (first, second) = forecast(text).ranks[0], forecast(text, mesh={"pipe": 2}).ranks
    assert first.gradients + second.gradients == whole.gradients and first.gradients != second.gradients
    assert first.activations > 0 and second.activations > 0 and first.activations != second.activations
    assert list(looked_at(text, mesh={"pipe": 2})["memory"]["by_rank"]) == ["rank 0", "rank 1"]


@pytest.mark.nightly
def test_a_budget_of_recompute_in_stages_is_in_the_plan_and_in_the_forecast(text: Path) -> None:
    plain = [one.activations for one in forecast(text, mesh={"pipe": 2}).ranks]
    saver = {"recompute": {"budget": f"{round(0.8 * max(plain))}B"}}
    plan = looked_at(text, mesh={"pipe": 2}, savers=[saver])["plan"]
    assert plan["savers"][0]["recompute"]["units"] and "micro-batches alive" in plan["reasons"]["savers"]
    found = [one.activations for one in forecast(text, mesh={"pipe": 2}, savers=[saver]).ranks]
    assert max(found) <= 0.8 * max(plain)


def rank(**given: int) -> RankMemory:
    return RankMemory(**{**NONE, **given})


def fit(machine: Machine, *ranks: RankMemory) -> Fit:
    return Fit(forecast=MemoryForecast(ranks=ranks), base=ProcessBase(GIB, 2 * GIB), machines=(machine,))


def test_a_machine_counts_libraries_once() -> None:
    one = fit(Machine(name="a", ranks=range(2), total=16 * GIB, free=8 * GIB), *[rank(parameters=GIB)] * 2)
    assert one.needed(one.machines[0]) == 2 * GIB + 2 * (GIB + GIB)
    assert one.fits and one.told([])["verdict"] == "fits"


def test_copies_count_their_imports_once() -> None:
    """Three processes of 1 GiB each: a copy has its buffers, and 40 MiB of what it writes to, for itself."""
    fresh = Machine(name="a", ranks=range(3), total=16 * GIB, free=8 * GIB)
    copied = replace(fresh, are_copies=True)
    one = fit(fresh, *[rank(parameters=GIB)] * 3)
    assert one.needed(fresh) == 2 * GIB + 3 * (GIB + GIB)
    assert one.needed(copied) == 2 * GIB + (GIB - (80 << 20)) + 3 * ((80 << 20) + GIB)
    assert ProcessBase(60 << 20, 0).of(3, are_copies=True) == 180 << 20, "no process has less than nothing to share"


def test_what_others_hold_must_be_given_back() -> None:
    one = fit(Machine(name="a", ranks=range(1), total=16 * GIB, free=4 * GIB), rank(parameters=3 * GIB))
    assert one.fits and "fits once other programs on a give back 2.0 GiB" in str(one.told([])["verdict"])


def test_what_does_not_fit_names_the_first_setting_that_does() -> None:
    one = fit(Machine(name="a", ranks=range(1), total=8 * GIB, free=8 * GIB), rank(activations=9 * GIB))
    tried: list[str] = []

    def change(name: str, size: int | None) -> Change:
        def forecast() -> MemoryForecast | None:
            tried.append(name)
            return None if size is None else MemoryForecast(ranks=(rank(activations=size * GIB),))

        return Change(name, forecast)

    told = one.told([change("x=1", None), change("x=2", 7), change("x=4", 3), change("x=8", 1)])
    assert told["fits"] is False and tried == ["x=1", "x=2", "x=4"]
    assert told["verdict"] == "does not fit: a has 8.0 GiB, 4.0 GiB too little; it fits with x=4 (6.0 GiB then)"
    none = one.told([change("x=2", 7)])["verdict"]
    assert "use more machines" in str(none) and "none of these is enough: x=2" in str(none)


def test_a_batch_that_is_too_large_is_told_to_accumulate(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.job.fit.resident_bytes", lambda: (0, 0))
    needs = looked_at(text, processes=1, batch=16)["memory"]["peak_bytes"][0]
    monkeypatch.setattr("gossamer.job.fit.memory", lambda: (needs - (1 << 20), needs))
    memory = looked_at(text, processes=1, batch=16)["memory"]
    assert not memory["fits"] and "it fits with train.accumulate=2" in memory["verdict"]


def test_a_forward_that_needs_values_leaves_activations_uncounted(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.spec.errors import BadInput

    def refuses(*_: object, **__: object) -> None:
        raise BadInput("the forward needs values", key="model")

    monkeypatch.setattr("gossamer.job.memory_forecast.ghost_step", refuses)
    assert "activations are not counted" in looked_at(text)["memory"]["not_counted"]


LINKS = HostLinks(names=("a", "b"), host_of=(0, 0, 1), links=(SshLink(0.001, 1e9), SshLink(0.04, 1e6)))
WIRE = {"0>1": 10**9, "0>2": 4 * 10**6, "2>0": 3 * 10**6, "1>2": 10**6}


def cure(setting: str, wire: Mapping[str, int] | None) -> Cure:
    return Cure(setting, lambda: wire)


def test_the_slowest_link_is_named_with_its_seconds_and_cures() -> None:
    told = told_of_hosts(LINKS, WIRE, [cure("much", WIRE), cure("some", {"0>2": 10**6}), cure("none", None)])
    assert told["seconds_per_step"] == 5.0 and told["slowest"] == "the link of b takes 5 s of every step"
    assert told["cures"] == {"some": "1 s per step"}


def test_a_link_that_costs_little_needs_no_cure() -> None:
    assert "cures" not in told_of_hosts(LINKS, {"0>2": 1000}, [cure("some", {"0>2": 1})])


def test_of_ranks_on_one_machine_common_links_are_told(text: Path) -> None:
    told = told_of_common({"0>1": 25 * 10**6}, [cure("some", {"0>1": 10**6})])
    assert told["if_links_had"] == {
        "10 Mbit/s": "20 s per step",
        "100 Mbit/s": "2 s per step",
        "1 Gbit/s": "200 ms per step",
    }
    assert list(told["cures"]) == ["some"]  # type: ignore[call-overload]
    assert told_of_common({}, []) == {}
    assert "on machines of their own each sends" in looked_at(text)["links"]["said"]


def test_a_link_is_measured_by_what_the_host_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ssh runs the reader here."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do case "$1" in -o) shift 2;; *) shift;; esac; done\n'
        'shift\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = measure_link("a", sys.executable)
    assert found is not None and found.bytes_per_s > 1e6 and found.round_trip_s > 0
    assert measure_link("a", "/no/such/python") is None
