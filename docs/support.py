"""Which features work together: every pair of them is planned for four ranks, and refused pairs say why.

docs/generate.py writes the page, and a test compares it with the code. Nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from gossamer.plan import Request
from gossamer.plan import build as planner
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

RANKS = 4
PAIRS, SINGLES = [[0, 1], [2, 3]], [[0], [1], [2], [3]]
_TIERS = {**dict.fromkeys(("device", "host", "file"), "1GiB"), "directory": "/data/states"}
Sections = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature: its name in prose, and the keys that ask for it; `otherwise`: the same for two replicas."""

    name: str
    sections: Sections
    otherwise: Sections | None = None


def _plan(**keys: Any) -> Sections:
    return {"plan": keys}


def _feedback(**inner: Any) -> Sections:
    return _plan(exchange={"error_feedback": {"inner": inner}})


FEATURES: tuple[Feature, ...] = (
    Feature("pipeline stages", _plan(mesh={"pipe": 2})),
    Feature("uneven stages", _plan(mesh={"pipe": 2}, stage_ranks=[[0, 1, 2], [3]])),
    Feature("activation compression", _plan(mesh={"pipe": 2}, activation_compression={"codec": "int8"})),
    Feature("unequal batch fractions", _plan(batch_fractions=[3, 2, 2, 1]), _plan(batch_fractions=[3, 1])),
    Feature("ZeRO 1", _plan(sharding="zero1")),
    Feature("ZeRO 1 within islands", _plan(sharding={"zero1": {"shard_group": "island"}})),
    Feature("ZeRO 2", _plan(sharding="zero2")),
    Feature("ZeRO 3", _plan(sharding="zero3")),
    Feature("SDP4Bit", _plan(sharding="sdp4bit")),
    Feature("states in tiers", _plan(sharding={"tiers": _TIERS})),
    Feature("states in tiers, divided", _plan(sharding={"tiers": {**_TIERS, "shard_group": "all"}})),
    Feature("int8 all-reduce", _feedback(two_shot={"codec": "int8"})),
    Feature("top-k", _feedback(topk={"fraction": 0.05})),
    Feature("PowerSGD", _feedback(powersgd={"rank": 2})),
    Feature("EF21", _plan(exchange={"ef21": {"inner": {"topk": {"fraction": 0.05}}}})),
    Feature("hierarchical exchange", _plan(exchange={"hierarchical": {"inter": "dense"}})),
    Feature("momentum of the exchange", {**_plan(exchange={"momentum": "dense"}), "train": {"max_grad_norm": 0}}),
    Feature("local SGD", _plan(sync={"local_sgd": {"sync_every": 2}})),
    Feature("DiLoCo", _plan(sync={"diloco": {"sync_every": 2}})),
    Feature("CO2", _plan(sync={"co2": {"sync_every": 2}})),
    Feature("CSER", _plan(sync={"cser": {"sync_every": 2}})),
    Feature("gossip", _plan(sync={"gossip": {"sync_every": 2}})),
    Feature("zeroth order", {**_plan(sync="just_one_byte"), "train": {"optimizer": {"sgd": {"lr": 1e-4}}}}),
    Feature("L-GreCo", _plan(adapt="l_greco")),
    Feature("BCRS", _plan(adapt="bcrs")),
    Feature("LAMB", {"train": {"optimizer": "lamb"}}),
    Feature("1-bit Adam", {"train": {"optimizer": "one_bit_adam", "max_grad_norm": 0}}),
    Feature("schedule-free AdamW", {"train": {"optimizer": "schedule_free_adamw", "lr_schedule": "constant"}}),
    Feature("Eva", {"train": {"optimizer": {"eva": {"lr": 0.05, "damping": 0.1}}, "max_grad_norm": 0}}),
    Feature("recompute", _plan(savers=["recompute"])),
    Feature("cut cross-entropy", _plan(savers=["cut_cross_entropy"])),
    Feature("bf16", {"train": {"precision": "bf16"}}),
    Feature("fp16", {"train": {"precision": "fp16"}}),
    Feature("verification", {"train": {"verify": {"every": 2}}}),
)


def merged(*all_of: Sections) -> dict[str, Any]:
    """Return the sections of several features as one configuration; the later ones win."""
    found: dict[str, Any] = {}
    for sections in all_of:
        for name, section in sections.items():
            found[name] = {**found.get(name, {}), **section}
    return found


def one_key(first: Feature, second: Feature) -> str:
    """Return the key that both features set, to different values; "" if they can be written together."""
    for name in first.sections.keys() & second.sections.keys():
        for key in first.sections[name].keys() & second.sections[name].keys():
            if first.sections[name][key] != second.sections[name][key]:
                return f"{name}.{key}"
    return ""


def configurations(*features: Feature) -> Iterator[RunConfig]:
    """Yield the configurations of a run with these features, with islands and without."""
    for islands in ("auto", PAIRS, SINGLES):
        base = {"train": {"batch": 8}, "machines": {"processes": RANKS, "islands": islands}}
        for written in product(*({0: one.sections, 1: one.otherwise or one.sections}.values() for one in features)):
            yield RunConfig.model_validate(merged(base, *written))


def working(*features: Feature) -> tuple[RunConfig | None, str]:
    """Return the first configuration with which these features work together, or None and why the first does not."""
    refusal = ""
    for config in configurations(*features):
        try:
            planner("data_parallel").plan(Request(config, RANKS))
        except BadInput as error:
            refusal = refusal or str(error)
        else:
            return config, ""
    return None, refusal


def verdicts() -> Iterator[tuple[Feature, Feature, str]]:
    """Yield every pair of features with "" if it works, "one key", or the refusal."""
    for first, second in combinations(FEATURES, 2):
        yield first, second, "one key" if one_key(first, second) else working(first, second)[1]


def page() -> str:
    """Return the page as Markdown."""
    said = {(one.name, other.name): why for one, other, why in verdicts()}
    said |= {(other, one): why for (one, other), why in said.items()}
    names = [one.name for one in FEATURES]
    marks = {"": "yes", "one key": ""}
    lines = [
        "# Which features work together",
        "For everybody who combines features: look up a pair before you write it. Every cell is the answer of the "
        f"check that `gossamer train`, `resume`, `--plan` and `--dry-run` make, for {RANKS} ranks, with islands where "
        "a feature needs them. yes: the pair is accepted; **no**: it is refused, the reason stands below; empty: both "
        "are values of one key. What is accepted computes what both features promise, or it is a bug.",
        "| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |",
    ]
    table = [lines.pop(), "|---|" + "---|" * len(names)]
    for number, name in enumerate(names, 1):
        cells = ["" if name == other else marks.get(said[name, other], "**no**") for other in names]
        table.append(f"| {number} {name} | " + " | ".join(cells) + " |")
    reasons = ["## Why not"]
    for name in names:
        mine = [(other, said[name, other]) for other in names if other != name and said[name, other] not in marks]
        if mine:
            reasons.append(f"### {name}")
            reasons.append("\n".join(f"- with {other}: {_one_line(why)}" for other, why in mine))
    return "\n\n".join([*lines, "\n".join(table), *reasons])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")
