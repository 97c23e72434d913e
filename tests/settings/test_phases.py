"""Phases of a run: their configurations, and what is refused of them before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gossamer.api.phased_run import train_command
from gossamer.api.transitions import CONTINUED, TRANSITIONS, transition_of
from gossamer.job.in_process import config_from
from gossamer.job.phase_checks import PhaseLook, check_text
from gossamer.settings import Resolved, load, show
from gossamer.settings.phases import Phase, phases_of
from gossamer.spec.errors import BadInput

SIZES = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def loaded(*phases: dict[str, Any], **train: Any) -> Resolved:
    given = {
        "model": {"hf": "llama", "config": SIZES},
        "data": {"source": "text:*.txt", "sequence": 16, "validation": 0.0},
        "train": {"steps": 4, "batch": 2, "evaluate_every": 0, "phases": list(phases), **train},
        "run": {"directory": "runs", "display": "quiet"},
    }
    return load(None, given=given)


def phases(*given: dict[str, Any]) -> list[Phase]:
    return phases_of(loaded(*given), Path("runs/RUN"))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("seven green stones under the river " * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def refused(resolved: Resolved, said: str) -> None:
    """It is refused before a run's folder is there."""
    with pytest.raises(BadInput, match=said):
        train_command(resolved)
    assert not Path("runs").exists()


def test_a_phase_has_the_runs_keys_and_its_own() -> None:
    first, second = phases(
        {"name": "one", "train": {"steps": 9}},
        {
            "name": "two",
            "data": {"sequence": 8},
            "model": {"config.hidden_size": 32},
            "train": {"optimizer.adamw.lr": 1e-5},
        },
    )
    assert (first.config.train.steps, first.config.model.start, first.start) == (9, None, None)
    assert first.config.train.phases == second.config.train.phases == []
    assert (second.config.train.steps, second.config.data.sequence) == (4, 8)
    assert second.config.model.config == {**SIZES, "hidden_size": 32}
    assert second.config.train.optimizer == {"adamw": {"lr": 1e-5}}
    assert second.config.model.start == "runs/RUN/starts/02-two"
    assert second.directory.path == Path("runs/RUN/phases/02-two")


def test_what_is_shown_is_read_back_equal(tmp_path: Path) -> None:
    resolved = loaded({"name": "one"}, {"name": "two", "by": {"wanda": {"sparsity": 0.5}}, "train": {"steps": 2}})
    (tmp_path / "run.yaml").write_text(show(resolved))
    assert load(tmp_path / "run.yaml").config == resolved.config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"name": "a"}, {"name": "a"}], "a name of its own for every phase"),
        ([{"name": "a", "by": "wanda"}], "first phase a that begins with the model of the run"),
        ([{"name": "a"}, {"name": "b", "model": {"start": "x"}}], "begins with the weights of the phase before"),
        ([{"name": "a"}, {"name": "b", "train": {"phases": []}}], "phases without phases of their own"),
        ([{"name": "a"}, {"name": "b", "train": {"stepz": 1}}], "phase b: .*train.stepz: there is no such key"),
        ([{"name": "a"}, {"name": "b", "train": {"steps": 0}}], "phase b: .*train.steps: wanted a whole number >= 1"),
        ([{"name": "a/b"}], "train.phases"),
        ([{"name": "a", "trian": {}}], "train.phases"),
    ],
)
def test_wrong_phases_are_refused(given: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        phases(*given)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"by": "wanda_2"}, "phase b: train.phases.1.by: wanted a method of one of these categories: grow, prune"),
        ({"by": {"wanda": {"sparsity": 2}}}, "phase b: .*sparsity"),
        (
            {"model": {"config.hidden_size": 32}},
            r"phase b: .*model: wanted .* of shape .*, as in the phase before",
        ),
        ({"model": {"config.num_hidden_layers": 2}}, "phase b: .*model: .*layers.1.* in this phase alone"),
        ({"by": "lemon", "model": {"config.hidden_size": 8}}, "phase b: .*target that is larger"),
        (
            {"data": {"tokenizer": "bpe:300"}, "model": {"config.vocab_size": 300}},
            "phase b: .*data.tokenizer: .*phase before",
        ),
        ({"data": {"source": "text:nothing/*"}}, "phase b: "),
        ({"plan": {"lossy": True, "exchange": "dense"}}, "phase b: .*plan.lossy"),
        ({"plan": {"sharding": "zero3"}, "train": {"loss": "nonsense"}}, "phase b: "),
        (
            {"by": {"magnitude": {"include": ["zzz"]}}},
            "phase b: .*train.phases.1.by: .*no linear layer is called 'zzz'",
        ),
        ({"by": "moe_pruner"}, "phase b: .*train.phases.1.by: .*a mixture of experts"),
        ({"by": {"magnitude": {"pattern": "2:7"}}}, "phase b: .*train.phases.1.by: .*groups of 7"),
        ({"train": {"loss": {"kl": {"teacher": "gone"}}}}, "phase b: .*'gone', which does not exist"),
        ({"machines": {"hosts": ["a", "b"]}}, "phase b: .*machines.hosts: wanted the hosts of the run in every phase"),
    ],
)
def test_a_later_phase_is_refused_before_the_first_step_by_its_name(
    corpus: Path, second: dict[str, Any], said: str
) -> None:
    refused(loaded({"name": "a"}, {"name": "b", **second}), said)


def test_weights_in_blocks_go_no_further(corpus: Path) -> None:
    adapter = {"adapter": "lora", "base": "int8"}
    refused(
        loaded({"name": "a", "model": adapter}, {"name": "b", "model": {"adapter": "none", "base": "full"}}),
        "phase b: .*model.base",
    )


@pytest.mark.parametrize("by", ["lemon", "magnitude", "gptq"])
def test_a_method_makes_nothing_of_an_adapter(corpus: Path, by: str) -> None:
    second = {"name": "b", "by": by, "model": {"adapter": "none"}}
    said = f"phase b: .*model.adapter: wanted a phase before that trains whole weights, of which {by} .*without `by`"
    refused(loaded({"name": "a", "model": {"adapter": "lora"}}, second), said)
    between = {"name": "m", "model": {"adapter": "none"}}  # in which it is merged
    last = {**second, "model": {"adapter": "lora" if by == "gptq" else "none"}}
    train_command(loaded({"name": "a", "model": {"adapter": "lora"}}, between, last), dry_run=True)


@pytest.mark.parametrize("second", [{}, {"by": "magnitude", "model": {"side": "none"}}, {"model": {"side": "none"}}])
def test_a_side_network_goes_no_further(corpus: Path, second: dict[str, Any]) -> None:
    model = {"config.num_hidden_layers": 3}
    first = {"name": "a", "model": {**model, "side": "unipt"}}
    second = {"name": "b", **second, "model": {**model, "side": "unipt", **second.get("model", {})}}
    refused(loaded(first, second), "phase b: .*model.side: .*a side network, which no other phase")


def test_a_side_network_may_come_last(corpus: Path) -> None:
    model = {"config.num_hidden_layers": 3}
    given = {"name": "a", "model": model}, {"name": "b", "model": {**model, "side": "unipt"}}
    assert list(train_command(loaded(*given), dry_run=True)["phases"]) == ["a", "b"]


def test_integers_go_no_further(corpus: Path) -> None:
    given = {"name": "b", "by": "round_to_nearest", "model": {"adapter": "lora"}}
    refused(loaded({"name": "a"}, given, {"name": "c"}), "phase c: .*begins with a quantized model: make it the last")


@pytest.mark.parametrize(
    ("by", "model", "said"),
    [
        ({"interpolate": {"onto": "runs/gone"}}, {"config.num_hidden_layers": 2}, "gone"),
        ({"assemble": {"parts": ["gone-0", "gone-1"]}}, {"config.num_hidden_layers": 2}, "gone-0"),
        ({"interpolate": {"alpha": 0.5}}, {"config.num_hidden_layers": 2}, "before it was coalesced.*got none"),
        ("g_stack", {"config.num_hidden_layers": 2, "config.hidden_size": 32}, "g_stack grows depth alone"),
    ],
)
def test_what_a_growth_needs_is_looked_for_before_the_first_step(
    corpus: Path, by: Any, model: dict[str, Any], said: str
) -> None:
    """And the key that an error names is one of the configuration."""
    with pytest.raises(BadInput, match=said) as caught:
        train_command(loaded({"name": "a"}, {"name": "b", "by": by, "model": model}))
    assert re.match(r"phase b: (python: )?(train\.phases\.1\.by|model): ", str(caught.value))
    assert not Path("runs").exists()


def test_a_loss_is_measured_on_the_text_of_the_phase_before(corpus: Path) -> None:
    config = loaded({"name": "a"}).config
    none: Any = None
    looks = [
        PhaseLook(config=one, told={}, origin=none, shapes={}, tokenizer="")
        for one in (config, config.model_copy(update={"data": config.data.model_copy(update={"factory": "my:data"})}))
    ]
    check_text(looks[0], "wanda")
    with pytest.raises(BadInput, match=r"data: wanted a phase before with text, .*data\.factory my:data"):
        check_text(looks[1], "wanda")


def test_a_dry_run_shows_each_phase(corpus: Path) -> None:
    found = train_command(loaded({"name": "a"}, {"name": "b", "by": "magnitude"}), dry_run=True)["phases"]
    assert list(found) == ["a", "b"]
    assert found["b"]["by"] == "magnitude" and found["b"]["memory"]["fits"]


def test_phases_belong_to_the_command(corpus: Path) -> None:
    with pytest.raises(BadInput, match=r"gossamer train run\.yaml"):
        config_from(loaded({"name": "a"}).config)
    with pytest.raises(BadInput, match="--plan"):
        train_command(loaded({"name": "a"}), plan=Path("plan.yaml"))


@pytest.mark.parametrize(("given", "starter"), [({"hosts": ["a", "b"]}, "hosts"), ({"ray_nodes": 2}, "ray")])
def test_hosts_get_the_command_with_all_phases(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], starter: str
) -> None:
    """Each goes through them itself; where this machine is none of them, it has no folder of the run."""
    asked: list[tuple[Any, ...]] = []

    def launch(*args: Any, files: dict[str, str], env: dict[str, str], **_: Any) -> int:
        asked.append((args, yaml.safe_load(files["run.yaml"]), env))
        return 0

    monkeypatch.setattr(f"gossamer.api.launcher.launch_{starter}", launch)
    done = train_command(loaded({"name": "a"}, {"name": "b", "by": "magnitude"}), **given)
    ((args, sent, env),) = asked
    assert args[0] == given.get("hosts", 2) and args[-1] == ["train", "{files}/run.yaml"]
    assert [one["name"] for one in sent["train"]["phases"]] == ["a", "b"]
    assert env["GOSSAMER_RUN_FOLDER"] == done["run"] and done["outcome"] == "unfinished"
    assert [one["outcome"] for one in done["phases"]] == ["unfinished"] * 2 and not [*Path("runs").iterdir()]


def test_methods_are_found_in_their_categories() -> None:
    assert transition_of("lemon") is TRANSITIONS["grow"] and transition_of("wanda") is TRANSITIONS["prune"]
    assert transition_of("gptq") is TRANSITIONS["quantize"] and transition_of(None) is CONTINUED


def test_masks_are_known_through_the_phases(corpus: Path) -> None:
    held = {"train": {"optimizer": {"static_mask": {"masks": "start"}}}}
    phases = [{"name": "a"}, {"name": "b", "by": "magnitude", **held}, {"name": "c", **held}]
    assert list(train_command(loaded(*phases), dry_run=True)["phases"]) == ["a", "b", "c"]
    filled = [{"name": "a"}, {"name": "b", "by": "magnitude"}, {"name": "c", **held}]  # b trains over its zeros
    refused(loaded(*filled), "phase c: .*wanted masks, which a phase")
    low = {"name": "b", "by": "magnitude", "model": {"adapter": "mask_lora"}}
    train_command(loaded({"name": "a"}, low), dry_run=True)
