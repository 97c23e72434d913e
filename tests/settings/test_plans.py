"""A plan from a file, beside what was written: its decisions are settings, and a contradiction names both places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gossamer.plan import data_parallel
from gossamer.settings.plan_file import PLANNED, asks_for_another_plan, with_plan
from gossamer.settings.resolve import load
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.spec.unread_keys import UNREAD, check_given
from gossamer.view.run_directory import plan_in

PLAN = Plan(
    mesh=MeshSizes(replica=2),
    batch_fractions=(0.5, 0.5),
    rows=(4, 4),
    microbatches=(1, 1),
    sharding="zero2",
    exchange="recursive_doubling",
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(yaml.safe_dump(PLAN.model_dump(mode="json"), sort_keys=False))
    return Path("plan.yaml")


def test_what_a_plan_decides_is_a_setting_with_the_line_it_stands_on(file: Path) -> None:
    resolved = with_plan(load(None, ["plan.lossy=true"]), file, ranks=2)
    config, line = resolved.config, 1 + file.read_text().splitlines().index("sharding: zero2")
    assert (config.plan.sharding, config.plan.exchange, config.train.batch) == ("zero2", "recursive_doubling", 8)
    assert resolved.origin["plan.sharding"] == f"plan.yaml:{line}"
    assert not config.plan.lossy, "the permission was for a choice that the plan has made"


@pytest.mark.parametrize(
    "given",
    [
        "plan.mesh.pipe=2",
        "plan.mesh.replica=4",
        "train.batch=16",
        "train.accumulate=4",
        "plan.sharding=none",
        "plan.sync=diloco",
        "plan.exchange=dense",
        "plan.batch_fractions=[3, 1]",
        "plan.pipeline_schedule=gpipe",
        "plan.stage_ranks=[[0], [1]]",
        "machines.islands=[[0], [1]]",
    ],
)
def test_what_is_written_and_not_what_the_plan_says_is_refused_with_both_places(given: str, file: Path) -> None:
    key = given.partition("=")[0]
    with pytest.raises(BadInput, match=r"wanted the value of the plan, .*plan\.yaml:\d+\), got") as error:
        with_plan(load(None, [given]), file, ranks=2)
    assert error.value.key == key


@pytest.mark.parametrize(
    "given", ["plan.sharding=zero2", "train.batch=8", "plan.batch_fractions=[2, 2]", "train.accumulate=1"]
)
def test_what_is_written_and_is_what_the_plan_says_is_taken(given: str, file: Path) -> None:
    assert with_plan(load(None, [given]), file, ranks=2).config.plan.sharding == "zero2"


def test_an_earlier_schedule_that_recomputes_is_compared_as_the_saver_that_it_is_now(tmp_path: Path) -> None:
    staged = Plan(mesh=MeshSizes(pipe=2), rows=(8,), microbatches=(4,), pipeline_schedule="gpipe")
    given = ["plan.pipeline_schedule={recompute: gpipe}", "plan.mesh.pipe=2"]
    for savers in ((), ("recompute",)):
        plan = staged.model_copy(update={"savers": savers})
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(plan.model_dump(mode="json")))
        if savers:
            assert with_plan(load(None, given), tmp_path / "p.yaml").config.plan.savers == ["recompute"]
            continue
        with pytest.raises(BadInput, match="wanted the value of the plan") as error:
            with_plan(load(None, given), tmp_path / "p.yaml")
        assert error.value.key == "plan.savers"


def test_what_a_run_measured_for_itself_contradicts_nothing(tmp_path: Path) -> None:
    paced = PLAN.model_copy(update={"sharding": "none", "sync": {"diloco": {"sync_every": 4, "local_steps": [4, 2]}}})
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(paced.model_dump(mode="json")))
    for steps in ("auto", [4, 2]):
        given = [f"plan.sync={{diloco: {{sync_every: 4, local_steps: {steps}}}}}"]
        assert with_plan(load(None, given), tmp_path / "p.yaml").config.plan.sync
    with pytest.raises(BadInput, match=r"plan\.sync: wanted the value of the plan, "):
        with_plan(load(None, ["plan.sync={diloco: {sync_every: 4, local_steps: [2, 4]}}"]), tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("sharding:", "shard:"), "shard: there is no such field"),
        (("rows:", "rows: 3\nrow:"), "rows: "),
        (("  pipe: 1", "  tensor: 2"), "mesh.tensor: there is no such field"),
        (("batch_fractions:", "batch_fractions: ["), "is no plan"),
    ],
    ids=lambda one: str(one)[:20],
)
def test_a_damaged_plan_says_what_is_wrong_with_it(change: tuple[str, str], said: str, file: Path) -> None:
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(BadInput, match=r"plan\.yaml is no plan: ") as error:
        plan_in(file)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_another_value_of_anything_a_planner_reads_is_another_plan() -> None:
    text = Path(data_parallel.__file__).read_text("utf-8")
    read = {".".join(found) for found in re.findall(r"config\.(train|data|machines)\.(\w+)", text)}
    assert read, "the planner reads these of a configuration"
    assert all(any(f"{key}.".startswith(f"{one}.") for one in PLANNED) for key in read)
    before = load(None).config
    for given in ("train.accumulate=4", "train.optimizer=lamb", "train.batch=8", "plan.sharding=zero1"):
        assert asks_for_another_plan(before, load(None, [given]).config)
    for given in ("train.steps=4", "train.max_grad_norm=0", "train.seed=1", "run.display=quiet"):
        assert not asks_for_another_plan(before, load(None, [given]).config)


WRITTEN: dict[str, list[Any]] = {
    "plan.cuts": ["plan.cuts=[0, 1]", "plan.mesh.pipe=2"],
    "plan.activation_compression": ["plan.activation_compression=codec", "plan.mesh.pipe=2"],
    "plan.adapt_every": ["plan.adapt_every=20", "plan.adapt=l_greco"],
    "plan.adapt_window": ["plan.adapt_window=5", "plan.adapt=l_greco"],
    "plan.lossy": ["plan.lossy=true", "plan.exchange=auto"],
    "train.verify.tolerance_factor": ["train.verify.tolerance_factor=9", "train.verify.every=3"],
    "train.verify.on_failure": ["train.verify.on_failure=warn", "train.verify.every=3"],
    "data.isolate": ["data.isolate=true", "data.pack=true"],
    "data.config": ["data.config={n: 3}", "data.factory=net:data"],
    "train.early_stop.min_delta": ["train.early_stop.min_delta=0.1", "train.early_stop.patience=3"],
    "train.early_stop.monitor": ["train.early_stop.monitor=loss", "train.early_stop.patience=3"],
    "train.adversarial.alpha": ["train.adversarial.alpha=0.1", "train.adversarial.epsilon=0.1"],
    "train.adversarial.direction": ["train.adversarial.direction=normalized", "train.adversarial.epsilon=0.1"],
    "train.adversarial.delay": ["train.adversarial.delay=1", "train.adversarial.epsilon=0.1"],
    "train.adversarial.ahead": ["train.adversarial.ahead=true", "train.adversarial.epsilon=0.1"],
    "train.adversarial.inputs": ["train.adversarial.inputs=[x]", "train.adversarial.epsilon=0.1"],
    "train.sample_max_new_tokens": ["train.sample_max_new_tokens=3", "train.sample_prompt=x"],
}


@pytest.mark.parametrize(
    "written",
    ["source=sotu", "tokenizer=bpe:300", "pack=false", "isolate=true", "validation=0", "cache=here"],
)
def test_a_key_of_text_beside_a_factory_is_refused(written: str) -> None:
    key = f"data.{written.partition('=')[0]}"
    with pytest.raises(BadInput, match="which reads no") as error:
        check_given(load(None, [f"data.{written}", "data.factory=net:data"]).config)
    assert error.value.key == key
    check_given(load(None, [f"data.{written}"]).config)


def test_every_rule_about_keys_is_tested() -> None:
    assert {one.key for one in UNREAD} == {*WRITTEN} | {
        f"data.{name}" for name in ("source", "tokenizer", "pack", "isolate", "validation", "cache")
    }


@pytest.mark.parametrize("key", WRITTEN)
def test_a_key_that_nothing_would_read_is_refused_and_beside_what_reads_it_taken(key: str) -> None:
    alone, beside = WRITTEN[key]
    against = {"plan.lossy": ["plan.exchange=dense"], "data.isolate": ["data.pack=false"]}.get(key, [])
    with pytest.raises(BadInput) as error:
        check_given(load(None, [alone, *against]).config)
    assert error.value.key == key
    check_given(load(None, [alone, beside]).config)
