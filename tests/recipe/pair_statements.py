"""What a pair of features must compute: which run its losses are held against, and how closely.

A feature is one of three kinds. `EXACT`: the losses are those of the other feature alone. `SPLIT`: the same, beside a
feature that does not compress what each rank or stage has. Every other has a `LIMIT`: settings in which it loses
nothing or does nothing, so that the limit beside the other feature must give the losses of the other feature alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

STEPS = 4
BASE: Sections = {
    "train": {
        "steps": STEPS,
        "batch": 8,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "max_grad_norm": 0,
        "optimizer": {"adamw": {"lr": 1e-2}},
    },
    "machines": {"processes": 4, "timeout_s": 50},
}
PAIRS = [[0, 1], [2, 3]]

EXCHANGES = ("int8 all-reduce", "top-k", "PowerSGD", "EF21", "hierarchical exchange", "momentum of the exchange")
LOSSY = EXCHANGES[:4]
SYNCS = ("local SGD", "DiLoCo", "CO2", "CSER", "gossip")
ISLANDS = ("hierarchical exchange", "ZeRO 1 within islands")  # which one machine does not show
POLICIES = ("L-GreCo", "BCRS")
PRECISIONS = ("bf16", "fp16")
EXACT = (
    "ZeRO 1",
    "ZeRO 1 within islands",
    "ZeRO 2",
    "ZeRO 3",
    "hierarchical exchange",
    "momentum of the exchange",
    "recompute",
    "cut cross-entropy",
    "verification",
    "states in tiers",
    "states in tiers, divided",
)
SPLIT = ("pipeline stages", "uneven stages", "unequal batch fractions")


def _exchange(written: Any) -> Sections:
    return {"plan": {"exchange": written}}


def _feedback(**inner: Any) -> Sections:
    return _exchange({"error_feedback": {"inner": inner}})


def _sync(name: str, **more: Any) -> Sections:
    return {"plan": {"sync": {name: {"sync_every": 1, **more}}}, "train": {"optimizer": {"sgd": {"lr": 1e-1}}}}


_AVERAGE = {"outer_optimizer": "average"}
_CODECS = ("weights", "gradients", "intra_gradients")
LIMIT: Mapping[str, Sections] = {
    "int8 all-reduce": _feedback(two_shot={"codec": "float32"}),
    "top-k": _feedback(topk={"fraction": 1.0}),
    "PowerSGD": _feedback(powersgd={"rank": 12}),
    "EF21": _exchange({"ef21": {"inner": {"topk": {"fraction": 1.0}}}}),
    "activation compression": {"plan": {"mesh": {"pipe": 2}, "activation_compression": {"codec": "float32"}}},
    "SDP4Bit": {"plan": {"sharding": {"sdp4bit": dict.fromkeys(_CODECS)}}},
    # of plain SGD, whose steps are linear in the gradient: the mean of one step each is the step of the mean
    "local SGD": _sync("local_sgd"),
    "DiLoCo": _sync("diloco", **_AVERAGE),
    "CSER": _sync("cser", exchange="dense", step_exchange=None),
    "gossip": _sync("gossip", global_sync_every=1),
    "CO2": {"plan": {"sync": {"co2": {"sync_every": 2, "warmup_steps": STEPS}}}},
}
_WARM = {
    "local SGD": "local_sgd",
    "DiLoCo": "diloco",
    "CO2": "co2",
    "CSER": "cser",
    "gossip": "gossip",
}


@dataclass(frozen=True, slots=True)
class Statement:
    """The losses of `measured` are those of `reference`, to a part `within`, in the first `steps` steps.

    `of`: "losses", or "norms" of the parameters in the end, where each island reports losses of its own rows.
    """

    measured: Sections
    reference: Sections
    within: float = 1e-5
    steps: int = STEPS
    of: str = "losses"


def merged(*all_of: Sections) -> dict[str, dict[str, Any]]:
    """Return the sections of several features as one configuration; the later ones win."""
    found: dict[str, dict[str, Any]] = {}
    for sections in all_of:
        for name, section in sections.items():
            found[name] = {**found.get(name, {}), **section}
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two features: their names, the sections of each, and the islands that the pair is run on."""

    names: tuple[str, str]
    written: Mapping[str, Sections]
    islands: Any

    def run(self, *of: Sections) -> dict[str, dict[str, Any]]:
        """Return the sections of a run on the pair's islands."""
        return merged(BASE, {"machines": {"islands": self.islands}}, *of)

    @property
    def both(self) -> dict[str, dict[str, Any]]:
        """Return the sections of the pair itself."""
        return self.run(*(self.written[name] for name in self.names))

    def alone(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the sections of one feature alone; of one that changes no loss, those of neither."""
        return self.run() if name in EXACT or name in SPLIT else self.run(self.written[name])

    def statements(self) -> tuple[Statement, ...]:
        """Return what the pair must compute."""
        for rule in (_adapted, _compressed, _limited, _exact, _split, _local_updates, _rounded):
            for one, other in (self.names, (self.names[1], self.names[0])):
                if found := rule(self, one, other):
                    rough = 3e-3 if {*self.names} & {*PRECISIONS} else 0.0  # sums of few bits, in another order
                    return tuple(replace(each, within=max(each.within, rough)) for each in found)
        raise AssertionError(f"nothing is said of {self.names}")


Found = tuple[Statement, ...]


def _adapted(pair: Pair, one: str, other: str) -> Found:
    """A policy with one candidate, or before it has chosen, changes nothing; so without an exchange on one machine."""
    if one not in POLICIES:
        return ()
    if other in SYNCS:
        carried = {"plan": {"adapt": {"bcrs": {"fraction": 1.0}}}}
        ((name, settings),) = pair.written[other]["plan"]["sync"].items()
        dense = {"plan": {"sync": {name: {**settings, "exchange": "dense"}}}}  # in place of which a policy's goes
        return (Statement(pair.run(pair.written[other], carried), pair.run(dense)),)
    if other not in EXCHANGES:
        return (Statement(pair.both, pair.alone(other)),)
    soon = {"plan": {"adapt_every": 2, "adapt_window": 2}}
    before = Statement(merged(pair.both, soon), pair.alone(other), steps=3)
    if one != "L-GreCo":
        return (before,)
    only = {"plan": {"adapt": {"l_greco": {"candidates": [pair.written[other]["plan"]["exchange"]]}}}}
    return before, Statement(merged(pair.both, soon, only), pair.alone(other))


def _compressed(pair: Pair, one: str, other: str) -> Found:
    """A compressed exchange that loses nothing is the mean; beside it SDP4Bit leaves gradients to it."""
    if one not in LOSSY:
        return ()
    limits = [LIMIT[one], LIMIT[other] if other == "SDP4Bit" else pair.written[other]]
    return (Statement(pair.run(*limits), pair.run() if other == "SDP4Bit" else pair.alone(other)),)


def _limited(pair: Pair, one: str, other: str) -> Found:
    """Compressed activations or sharded states that lose nothing are those of the other feature alone."""
    if one not in ("activation compression", "SDP4Bit"):
        return ()
    return (Statement(pair.run(pair.written[other], LIMIT[one]), pair.alone(other)),)


def _exact(pair: Pair, one: str, other: str) -> Found:
    return (Statement(pair.both, pair.alone(other)),) if one in EXACT else ()


def _split(pair: Pair, one: str, other: str) -> Found:
    is_apart = other in SYNCS or other == "zeroth order"
    return (Statement(pair.both, pair.alone(other)),) if one in SPLIT and not is_apart else ()


def _local_updates(pair: Pair, one: str, other: str) -> Found:
    """Islands that average after each step of plain SGD, or never part, train as one."""
    if one not in SYNCS:
        return ()
    if other == "unequal batch fractions":
        optimizer = {"train": LIMIT[one].get("train", {})}
        return (Statement(pair.run(pair.written[other], LIMIT[one]), pair.run(optimizer), of="norms"),)
    name = _WARM[one]
    together = {"plan": {"sync": {name: {"sync_every": 2, "warmup_steps": STEPS}}}}
    found = Statement(pair.run(together, pair.written[other]), pair.alone(other))
    return (found, Statement(pair.both, pair.alone(one), 2e-2)) if other in PRECISIONS else (found,)


def _rounded(pair: Pair, one: str, other: str) -> Found:
    """Fewer bits, or other losses per byte, change losses little."""
    return (Statement(pair.both, pair.alone(other), 2e-2),) if one in (*PRECISIONS, "unequal batch fractions") else ()
