"""Files, plans and runs of earlier versions: read under the present names, or refused with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gossamer.settings import load, reload
from gossamer.settings.catalog import categories
from gossamer.settings.methods import check_methods, check_names
from gossamer.settings.upgrade_file import upgrade_file, upgraded
from gossamer.spec.config import RunConfig
from gossamer.spec.earlier_names import KEYS, METHODS, PARAMETERS, PLAN_FIELDS, VALUES
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import PLAN_FORMAT, Plan
from gossamer.spec.upgrade import configuration, dotted
from gossamer.view.run_directory import RunDirectory, newest_like, plan_in

EARLIER = """\
# my run
model: {hf: llama}  # tiny
plan:
  states: "whole"
  boundary: [plain, {coded: int8}]
  exchange:
    - [embed, between, {error_feedback: {gather: {codec: {int8: {block_numel: 64}}}}}]
    - ['.*', island, identity]
  sync: {diloco: {every: 4, outer: {nesterov: {mu: 0.9}}}}
  residuals: drop
train:
  clip: 1
  sample: tree  # a prompt, not a method
  verify: {margin: 4, on_failure: tell}
"""
PRESENT = """\
# my run
model: {hf: llama}  # tiny
plan:
  sharding: "none"
  activation_compression: [none, {codec: int8}]
  exchange:
    - [embed, inter, {error_feedback: {all_gather: {codec: {int8: {block_size: 64}}}}}]
    - ['.*', intra, float32]
  sync: {diloco: {sync_every: 4, outer_optimizer: {nesterov: {momentum: 0.9}}}}
  residuals_on_resume: reset
train:
  max_grad_norm: 1
  sample_prompt: tree  # a prompt, not a method
  verify: {tolerance_factor: 4, on_failure: warn}
"""
EARLIER_PLAN = """\
format: 1
mesh: {replica: 1, pipe: 2, tensor: 1}
share: [0.5, 0.5]
rows: [8]
microbatches: [4]
schedule: one_f_one_b
stages: [[0], [1]]
cuts: [block.0, block.1]
boundary: [{coded: {codec: {int8: {block_numel: 64}}}}]
exchange: tree
states: whole
reasons: {share: given, exchange: by hand}
"""


def test_a_file_keeps_its_comments_and_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(EARLIER)
    renamed = upgrade_file(file)
    assert file.read_text() == PRESENT
    assert [one.line for one in renamed] == sorted(one.line for one in renamed)
    check_methods(load(file))
    assert upgrade_file(file) == () and file.read_text() == PRESENT
    assert not list(tmp_path.glob(".*"))


def test_a_pattern_of_parameters_is_no_method_and_candidates_are() -> None:
    lines = [["tree", "inter", "dense"], ["gather", "all", "tree"], ["whole", "island", "identity"]]
    given = {"exchange": lines, "adapt": {"l_greco": {"candidates": ["gather", {"two_shot": {"back": "identity"}}]}}}
    wanted = {
        "exchange": [
            ["tree", "inter", "dense"],
            ["gather", "all", "recursive_doubling"],
            ["whole", "intra", "float32"],
        ],
        "adapt": {"l_greco": {"candidates": ["all_gather", {"two_shot": {"return_codec": "float32"}}]}},
    }
    assert configuration({"plan": given}) == {"plan": wanted}
    assert configuration({"plan": wanted})["plan"]["exchange"][0] == ["tree", "inter", "dense"]
    now, _ = upgraded(yaml.safe_dump({"plan": given}), "run.yaml")
    assert yaml.safe_load(now) == {"plan": wanted}


def test_an_alias_is_renamed_once() -> None:
    text = "plan:\n  exchange: &one {two_shot: {codec: identity, back: identity}}\n  sync: {diloco: {exchange: *one}}\n"
    now, renamed = upgraded(text, "run.yaml")
    assert len(renamed) == 3 and now.count("float32") == 2 and "return_codec" in now


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.yaml", "plan: {microbatches: 4}", "run.yaml:1: plan.microbatches is train.accumulate now"),
        ("run.toml", "[plan]\nstates = 'whole'\n", "not TOML"),
    ],
)
def test_what_is_left_to_the_user_is_said_and_the_file_stays(name: str, text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(BadInput, match=said.replace(".", r"\.")):
        upgrade_file(file)
    assert file.read_text() == text


def test_a_new_file_with_earlier_names_is_refused_with_the_present_ones(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(EARLIER)
    with pytest.raises(BadInput) as error:
        load(file)
    for old in (
        "plan.states",
        "plan.boundary",
        "plan.residuals",
        "train.clip",
        "train.sample",
        "train.verify.margin",
    ):
        assert f"{old}: the key is {KEYS[old]} now" in str(error.value)
    for written, said in [
        ("plan.exchange=tree", "it is 'recursive_doubling' now"),
        ("plan.sync.diloco.every=3", "it is 'sync_every' now"),
        ("plan.sync.diloco.outer_optimizer.nesterov.mu=0.9", "it is 'momentum' now"),
        ("plan.exchange=[['.*', between, dense], ['.*', intra, dense]]", "it is inter now"),
    ]:
        for check in (check_names, check_methods):
            with pytest.raises(BadInput) as error:
                check(load(None, [written]))
            assert said in str(error.value)


def test_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "records.jsonl").touch()
    run.config_file.write_text(EARLIER)
    run.provenance_file.write_text('{"plan.states": "mine.yaml:4", "plan.sync.diloco.every": "command line"}')
    run.plan_file.write_text(EARLIER_PLAN)
    assert run.config() == RunConfig.model_validate(yaml.safe_load(PRESENT))
    assert run.provenance() == {"plan.sharding": "mine.yaml:4", "plan.sync.diloco.sync_every": "command line"}
    resolved = reload(tmp_path, ["train.max_grad_norm=2"])
    assert resolved.config.plan == run.config().plan and resolved.config.train.max_grad_norm == 2.0
    assert resolved.origin["plan.sharding"] == "mine.yaml:4"
    check_methods(resolved)
    plan = plan_in(run.plan_file)
    assert (plan.format, plan.stage_ranks, plan.sharding) == (PLAN_FORMAT, ((0,), (1,)), "none")
    assert plan.exchange == "recursive_doubling" and plan.pipeline_schedule == "one_f_one_b"
    assert plan.activation_compression == ({"codec": {"codec": {"int8": {"block_size": 64}}}},)
    assert plan.reasons == {"batch_fractions": "given", "exchange": "by hand"}


def test_present_names_stay() -> None:
    values = yaml.safe_load(PRESENT)
    assert configuration(values) == values
    assert dotted("plan.sync.diloco.sync_every") == "plan.sync.diloco.sync_every"


def test_words_of_users_and_parameters_are_no_earlier_methods() -> None:
    """`plain` of eva, a folder called tree, a unit called plain: these words were names of methods of the plan."""
    values = {
        "model": {"adapter": {"qfa": {"integers": "whole"}}},
        "train": {"optimizer": {"eva": {"plain": ["embed", "tree"]}}, "loss": {"kl": {"teacher": "tree"}}},
        "plan": {"savers": [{"recompute": {"units": ["plain"]}}], "sharding": {"zero1": {"whole": True}}},
    }
    assert configuration(values) == values
    text = yaml.safe_dump(values)
    assert upgraded(text, "run.yaml") == (text, ())
    assert dotted("train.optimizer.eva.plain") == "train.optimizer.eva.plain"


def test_a_run_is_like_its_configuration_however_a_program_wrote_it(tmp_path: Path) -> None:
    for optimizer in ({"adamw": {"betas": (0.9, 0.99)}}, {"eva": {"plain": ["embed"]}}):
        config = RunConfig.model_validate({"train": {"steps": 7, "optimizer": optimizer}})
        run = RunDirectory.create(tmp_path, "run")
        run.keep(config, {})
        assert newest_like(tmp_path, config) == run


def test_micro_batches_of_an_earlier_run_are_those_of_the_training() -> None:
    assert configuration({"plan": {"microbatches": 4}}) == {"plan": {}, "train": {"accumulate": 4}}
    assert configuration({"plan": {"microbatches": "auto"}, "train": {"accumulate": 2}})["train"] == {"accumulate": 2}


def test_the_table_leads_to_names_that_exist_and_from_names_that_do_not() -> None:
    pages = categories()
    methods = {name: method for page in pages.values() for name, method in page.methods.items()}
    for new in KEYS.values():
        section, _, name = new.rpartition(".")
        model = RunConfig.model_fields[section.split(".")[0]].annotation
        for part in section.split(".")[1:]:
            model = model.model_fields[part].annotation  # type: ignore[union-attr]
        assert name in model.model_fields  # type: ignore[union-attr]
    assert set(PLAN_FIELDS.values()) <= set(Plan.model_fields) and not set(PLAN_FIELDS) & set(Plan.model_fields)
    assert set(METHODS.values()) <= set(methods) and not set(METHODS) & set(methods)
    for method, names in PARAMETERS.items():
        known = {p.name for page in pages.values() if method in page.methods for p in page.methods[method].parameters}
        assert set(names.values()) <= known and not set(names) & known, method
    for key, words in VALUES.items():
        for new in words.values():
            load(None, [f"{key}={new}"])
