"""One law at every door: whatever two methods do not go together is refused in the same words, however a plan comes.

A door is followed up to where the plan is asked, and no further: no process starts, and nothing is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from gossamer.api import verbs
from gossamer.api.launcher import Launcher
from gossamer.job import dry_run, in_process
from gossamer.launch.environment import LauncherRank, MasterAddress
from gossamer.loss.next_token import NextToken
from gossamer.partition import rank_model
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.plan_file import read_plan
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.plan import Request, build
from gossamer.recipe import check_loop
from gossamer.run.batches import DatasetBatches
from gossamer.settings.methods import check_names
from gossamer.settings.plan_file import with_plan
from gossamer.settings.resolve import load
from gossamer.settings.yaml_io import flow
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.view.run_directory import RunDirectory

RANKS = 4
Sections = Mapping[str, Any]
BASE: Sections = {
    "model": {"factory": "law_model:make"},
    "data": {"source": "text:corpus.txt", "tokenizer": "byte", "sequence": 32, "cache": "cache"},
    "train": {"batch": 8, "steps": 4},
    "machines": {"processes": RANKS},
    "run": {"directory": "runs", "name": "law", "display": "quiet"},
}
ISLANDS = {"machines": {"islands": [[0, 1], [2, 3]]}}
SLOW = {"train": {"optimizer": {"sgd": {"lr": 1e-4}}}}


def exchange(written: Any, **train: Any) -> Sections:
    return {"plan": {"exchange": written}, "train": train}


SHAPES: dict[str, Sections] = {
    "alone": {},
    "stages": {"plan": {"mesh": {"pipe": 2}}},
    "zero1": {"plan": {"sharding": "zero1"}},
    "zero2": {"plan": {"sharding": "zero2"}},
    "zero3": {"plan": {"sharding": "zero3"}},
    "sdp4bit": {"plan": {"sharding": "sdp4bit"}, **ISLANDS},
    "diloco": {"plan": {"sync": {"diloco": {"sync_every": 2}}}, **ISLANDS},
    "diloco alone": {"plan": {"sync": {"diloco": {"sync_every": 2}}}, "machines": {"islands": [[0], [1], [2], [3]]}},
    "gossip": {"plan": {"sync": {"gossip": {"sync_every": 2}}}, "machines": {"islands": [[0], [1], [2], [3]]}},
    "just_one_byte": {"plan": {"sync": "just_one_byte"}, **SLOW},
}
OTHERS: dict[str, Sections] = {
    **{name: shape for name, shape in SHAPES.items() if name != "alone"},
    "zero1 on islands": {"plan": {"sharding": {"zero1": {"shard_group": "island"}}}, **ISLANDS},
    "cser": {"plan": {"sync": {"cser": {"sync_every": 2}}}, **ISLANDS},
    "second moments": {"plan": {"sync": {"diloco": {"average_second_moments_every": 2}}}, **ISLANDS},
    "tree": exchange("recursive_doubling"),
    "star": exchange("star"),
    "int8": exchange({"two_shot": "int8"}),
    "ef21": exchange({"ef21": {"topk": {}}}),
    "powersgd": exchange({"error_feedback": "powersgd"}),
    "momentum": exchange({"momentum": "dense"}),
    "momentum, not clipped": exchange({"momentum": "dense"}, max_grad_norm=0.0),
    "momentum inside": exchange({"warmup": {"inner": {"momentum": {"two_shot": "int4"}}}}),
    "hierarchical": exchange({"hierarchical": {"inter": "dense"}}),
    "lines": exchange([[".*", "inter", "dense"], [".*", "intra", "int8"]]),
    "accumulate": {"train": {"accumulate": 2}},
    "fp16": {"train": {"precision": "fp16"}},
    "adamw": {"train": {"optimizer": "adamw"}},
    "lamb": {"train": {"optimizer": "lamb"}},
    "one_bit_adam": {"train": {"optimizer": "one_bit_adam"}},
    "zero_one_adam": {"train": {"optimizer": "zero_one_adam"}},
    "shares": {"plan": {"batch_fractions": [3.0, 1.0, 1.0, 1.0]}},
    "l_greco": {"plan": {"adapt": "l_greco"}},
    "bcrs": {"plan": {"adapt": "bcrs"}},
    "ada_topk": {"plan": {"adapt": "ada_topk"}},
    "verify": {"train": {"verify": {"every": 2}}},
    "prove": {"train": {"prove": "always"}},
    "gpipe": {"plan": {"pipeline_schedule": "gpipe"}},
    "boundary": {"plan": {"activation_compression": {"codec": "int8"}}},
    "lossy": {"plan": {"lossy": True}},
    "drop": {"plan": {"residuals_on_resume": "reset"}},
    "adapt_every": {"plan": {"adapt_every": 20}},
}


def merged(*all_of: Sections) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sections in all_of:
        for name, section in sections.items():
            found[name] = {**found.get(name, {}), **section}
    return found


def goes_beside(shape: Sections, other: Sections) -> bool:
    """Whether both can be written: they have no key of a plan in common."""
    return all(not set(shape.get(s, {})) & set(other.get(s, {})) for s in ("plan", "machines"))


PAIRS = [
    (one, other)
    for one, shape in SHAPES.items()
    for other, written in OTHERS.items()
    if goes_beside(shape, written) and not (one == "stages" and other == "shares")
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 4), nn.Linear(4, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(input_ids))
        return out


class Lawful(Exception):
    """The plan was asked, and nothing was wrong with it."""


ROWS = [{"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)} for _ in range(8)]
PLACE = LauncherRank(
    rank=0,
    ranks=RANKS,
    local_rank=0,
    local_ranks=RANKS,
    host=0,
    hosts=1,
    hostname="",
    launcher="torchrun",
    master=MasterAddress(host="127.0.0.1", port=0),
)


def held(config: RunConfig, plan: Plan | None = None) -> None:
    """What a rank does first, whoever started it."""
    batches = DatasetBatches(ROWS)
    asked = PartitionRequest(
        config=config, ranks=RANKS, rank=0, batches=batches, objective=NextToken(), device=torch.device("cpu")
    )
    build_rank_model(ModuleSource(Net()), asked, plan)


def trained(shape: Sections, other: Sections, folder: Path) -> None:
    held(load(None, given=merged(BASE, shape, other)).config)


def by_file(shape: Sections, other: Sections, folder: Path) -> None:
    """The words of the plan in a file, which no planner has seen; all else beside it."""
    given = merged(BASE, shape, other)
    words = dict(given["plan"]) if "plan" in given else {}
    beside = {k: words.pop(k) for k in ("adapt", "adapt_every", "lossy", "residuals_on_resume") if k in words}
    stages = words.pop("mesh", {}).get("pipe", 1)
    replicas = RANKS // stages
    share = words.pop("batch_fractions", [1.0] * replicas)
    plain = words.get("sync", "every_step") in ("auto", "every_step") and stages == 1
    boundary = words.pop("activation_compression", "none")
    plan = Plan(
        mesh=MeshSizes(replica=replicas, pipe=stages),
        batch_fractions=tuple(one / sum(share) for one in share),
        rows=(8 // replicas,) * replicas,
        microbatches=(given["train"].get("accumulate", 1),) * replicas,
        pipeline_schedule=words.pop("pipeline_schedule", "single_stage" if stages == 1 else "one_f_one_b"),
        exchange=words.pop("exchange", "auto" if plain else "dense"),
        islands=tuple(map(tuple, given["machines"].pop("islands", ()))),
        activation_compression=boundary,
        **words,
    )
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(plan.model_dump(mode="json")))
    resolved = load(None, given={**given, "plan": beside})
    check_names(resolved)
    held(with_plan(resolved, file, ranks=RANKS).config, read_plan(file, ranks=RANKS))


def resumed(shape: Sections, other: Sections, folder: Path) -> None:
    """A run of the one, with a plan of its own, that is to go on with the other."""
    begun = load(None, given=merged(BASE, shape))
    directory = RunDirectory(folder / "run")
    directory.keep(begun.config, begun.origin)
    directory.keep_plan(build("data_parallel").plan(Request(config=begun.config, ranks=RANKS)))
    verbs.resume_command(directory.path, [f"{s}.{k}={flow(v)}" for s, keys in other.items() for k, v in keys.items()])


def in_python(shape: Sections, other: Sections, folder: Path) -> None:
    in_process.train_in_process(Net(), ROWS, merged(BASE, shape, other))


def dried(shape: Sections, other: Sections, folder: Path) -> None:
    dry_run.dry_run(load(None, given=merged(BASE, shape, other)).config)


def planned(shape: Sections, other: Sections, folder: Path) -> None:
    verbs.plan(Net(), merged(BASE, shape, other), ranks=RANKS)
    raise Lawful


OTHER_WORDS = (by_file, resumed)  # where a plan does not come from what was asked
SAME_WORDS = (in_python, dried, planned)  # one of them at a time: they ask one planner


def said(door: Callable[[Sections, Sections, Path], None], shape: Sections, other: Sections, folder: Path) -> str:
    """The error of a door; "" where the plan is lawful."""
    try:
        door(shape, other, folder)
    except Lawful:
        return ""
    except BadInput as error:
        return str(error)
    raise AssertionError(f"{door.__name__} does not ask")


@pytest.fixture
def at_the_doors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Every door, closed behind whoever is lawful."""
    (tmp_path / "corpus.txt").write_text("To be, or not to be, that is the question. " * 400)
    (tmp_path / "law_model.py").write_text("from plan.test_law import Net\ndef make():\n    return Net()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ask = rank_model._begun

    def asked(*given: Any) -> Plan:
        ask(*given)
        raise Lawful

    def here(launch: Launcher) -> None:
        """What every rank does: read what stands in the run's folder."""
        file = launch.directory.plan_file
        held(launch.directory.config(), read_plan(file, ranks=RANKS) if file.exists() else None)

    monkeypatch.setattr(rank_model, "_begun", asked)
    monkeypatch.setattr(Launcher, "here", here)
    for changes_the_process in ("set_memory", "set_threads"):
        monkeypatch.setattr(in_process, changes_the_process, lambda *given: None)
    monkeypatch.setattr(in_process, "launcher_of", lambda environment: "torchrun")
    monkeypatch.setattr(in_process, "read_environment", lambda: PLACE)
    yield tmp_path


# What is refused beside each, as the laws are today: a law that is lost, or one too many, is seen here.
_ANYWHERE = {"adapt_every", "boundary", "momentum", "momentum inside", "ada_topk"}
_STATES = {"stages", "just_one_byte", "l_greco", "bcrs", "lamb", "one_bit_adam", "zero_one_adam", "verify"}
_APART = {"cser", "diloco", "diloco alone", "gossip", "second moments"}
_SHARDED = {"zero1", "zero2", "zero3"}
_INSIDE = _ANYWHERE | _SHARDED | {"drop", "l_greco", "lossy", "stages", "verify", "zero_one_adam"}
_EXCHANGES = {"tree", "star", "int8", "ef21", "powersgd", "momentum, not clipped", "hierarchical", "lines"}
_RULES = {"adamw", "lamb", "one_bit_adam", "zero_one_adam", "fp16"}
REFUSED: dict[str, set[str]] = {
    "alone": _ANYWHERE,
    "stages": (_ANYWHERE - {"boundary", "ada_topk"} | _SHARDED | _APART | {"sdp4bit", "zero1 on islands"})
    | {"bcrs", "l_greco", "drop", "lossy", "hierarchical", "lines", "just_one_byte", "verify"},
    "zero1": _ANYWHERE | _STATES | _APART,
    "zero2": _ANYWHERE | _STATES | _APART,
    "zero3": _ANYWHERE | _STATES | _APART | {"gpipe"},
    "sdp4bit": _ANYWHERE | _STATES,
    "diloco": _INSIDE | {"bcrs"},
    "diloco alone": _INSIDE,
    "gossip": _INSIDE - {"drop"} | {"bcrs"},
    "just_one_byte": (_INSIDE | _EXCHANGES | _RULES | {"bcrs", "sdp4bit", "zero1 on islands", "prove"}),
}


DAILY = ("stages", "zero3", "diloco")  # the others by night


@pytest.mark.parametrize(
    "one", [pytest.param(one, marks=[] if one in DAILY else [pytest.mark.nightly]) for one in SHAPES]
)
def test_every_door_says_the_same(one: str, at_the_doors: Path) -> None:
    """Of what a run is made of, beside everything else that changes what a run is."""
    refused, lawful = [], []
    for number, (_, other) in enumerate(pair for pair in PAIRS if pair[0] == one):
        shape, written = SHAPES[one], OTHERS[other]
        law = said(trained, shape, written, at_the_doors)
        (refused if law else lawful).append(other)
        for door in (*OTHER_WORDS, SAME_WORDS[number % 3]):
            folder = at_the_doors / f"{door.__name__}-{number}"
            folder.mkdir()
            told = said(door, shape, written, folder)
            same = law.partition(":")[0] if other == "lossy" else law  # a file names an exchange: so does what is told
            assert (same in told) if law else not told, (one, other, door.__name__, law, told)
    assert set(refused) == REFUSED[one]
    assert lawful


@pytest.mark.parametrize("other", [name for name, one in OTHERS.items() if "exchange" in one.get("plan", {})])
def test_ones_own_loop_is_asked_too(other: str, at_the_doors: Path) -> None:
    written = merged(BASE, OTHERS[other])
    law = said(trained, {}, OTHERS[other], at_the_doors)
    try:
        check_loop(exchange=written["plan"]["exchange"], max_grad_norm=written["train"].get("max_grad_norm", 1.0))
    except BadInput as error:
        speaks_of_islands = other in ("hierarchical", "lines")
        assert speaks_of_islands or law.replace("plan.exchange", "exchange").replace(
            "train.max_grad_norm", "max_grad_norm"
        ) == str(error)
    else:
        assert not law


@pytest.mark.parametrize(
    ("sharding", "optimizer", "wanted"),
    [
        ("zero2", "lamb", "set plan.sharding to {zero2: {whole: true}}, which gives every parameter one owner"),
        ({"zero1": {"whole": True}}, "lamb", ""),
        ({"zero3": {"whole": True}}, "muon", ""),
        ({"zero1": {"whole": True}}, {"muon": {"rest": "zero_one_adam"}}, "the same by rows or by whole parameters"),
        ({"zero1": {"whole": True}}, "zero_one_adam", "the same by rows or by whole parameters"),
    ],
)
def test_optimizers_of_whole_parameters(sharding: Any, optimizer: Any, wanted: str, at_the_doors: Path) -> None:
    law = said(trained, {"plan": {"sharding": sharding}}, {"train": {"optimizer": optimizer}}, at_the_doors)
    assert wanted in law if wanted else not law
