"""What `plan.exchange: auto` measures on real rate-limited links, beside uniform settings named by hand.

Every row is a setting of the laboratory: a model, hosts, the rate of each host's link, the round trip between two.
auto and some methods, as many as memory holds, train at once and take turns of a few steps (`links.turns`), so that a
machine that slows down slows all of them; then auto starts anew beside the next ones. Methods whose bytes alone take
many seconds are not tried, those that are far behind end after a turn. A yardstick, hosts that exchange nothing, tells
how fast the machine was when auto made its forecast, and in each round of turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gossamer.plan.exchange import CANDIDATES
from links import interleaved
from links.interleaved import Program
from links.method import Method
from links.rounds import Link
from links.setting import PARAMETERS

AUTO = Method("auto", False, {"exchange": "auto", "lossy": True})
BY_HAND = tuple(  # without those that the others beat on every link between few hosts, or that serve tables alone
    Method(one.said, False, {"exchange": one.written})
    for one in CANDIDATES
    if one.said not in ("recursive doubling", "star", "sparse all-reduce")
)
BITS = {"all-reduce": 32, "bf16 two-shot": 16, "bf16 recursive doubling": 16, "int8 two-shot": 8, "int4 two-shot": 4}
_HOPELESS_S, _SLOWEST = 8.0, 1.5  # of bytes alone in a step of 1 to 3 s; of a first turn, in those of auto
_HOSTS_AT_ONCE = 14 - interleaved.HOSTS_OF_YARDSTICK  # a host takes 1 to 2 GB


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on some hosts. `round_trip_ms`: between any two of them."""

    model: str
    hosts: int
    rate: str
    round_trip_ms: float

    @staticmethod
    def read(text: str) -> Setting:
        """Read MODEL:HOSTS:RATE:ROUND_TRIP_MS, such as gpt2:2:100mbit:10."""
        model, hosts, rate, round_trip_ms = text.split(":")
        return Setting(model, int(hosts), rate, float(round_trip_ms))

    def link(self) -> Link:
        return Link(self.hosts, self.rate, self.round_trip_ms / 2)


SETTINGS = (
    Setting("gpt2", 2, "30mbit", 0.0),
    Setting("gpt2", 2, "100mbit", 10.0),
    Setting("gpt2", 2, "1gbit", 50.0),
    Setting("gpt2", 4, "100mbit", 0.0),
    Setting("llama", 2, "30mbit", 10.0),
    Setting("llama", 2, "100mbit", 0.0),
    Setting("llama", 2, "1gbit", 0.0),
    Setting("llama", 4, "100mbit", 50.0),
)


@dataclass(frozen=True, slots=True)
class Group:
    """What was measured of programs that trained at once: figures by method and turn, and the yardstick by round."""

    figures: dict[str, list[dict[str, Any]]]
    slowdown: list[float]


def rows(
    settings: Sequence[Setting], methods: Sequence[Method], *, turns: int, steps: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row per setting, out of `turns` turns of `steps` steps; the first step of each turn does not count."""
    for one in settings:
        named = [method for method in methods if _wire_s(method, one) < _HOPELESS_S]
        at_once = max(1, _HOSTS_AT_ONCE // one.hosts - 1)
        groups = [
            _group((AUTO, *named[at : at + at_once]), one, turns, steps, say) for at in range(0, len(named), at_once)
        ]
        yield _row(one, groups)


def _wire_s(method: Method, one: Setting) -> float:
    """Return the seconds that all bytes of a code that sends every number take on one host's link; 0 for others."""
    rate = float(one.rate.removesuffix("mbit")) if one.rate.endswith("mbit") else 1e3 * float(one.rate[:-4])
    megabits = PARAMETERS[one.model] * BITS.get(method.name, 0) / 1e6
    return 2 * (one.hosts - 1) / one.hosts * megabits / rate


def _group(methods: Sequence[Method], one: Setting, turns: int, steps: int, say: Callable[[str], None]) -> Group:
    """Return the figures of `methods`, all of which train at once beside a yardstick, in turns (`links.turns`)."""
    todo = [Program(f"p{i}", method, one.link(), one.model, turns, steps) for i, method in enumerate(methods)]
    beside = interleaved.yardstick_for(todo[0])
    *results, measured = interleaved.run(todo, lambda line: say(f"{one}: {line}"), slowest=_SLOWEST, yardstick=beside)
    figures = {
        program.method.name: interleaved.by_turn(found, program) for program, found in zip(todo, results, strict=True)
    }
    return Group(figures, interleaved.speeds(interleaved.by_turn(measured, beside)))


def _row(one: Setting, measured: Sequence[Group]) -> dict[str, Any]:
    """Return a setting's row. `behind`: of the group, a part of the methods beside auto, in which auto is furthest so.

    auto_s, best_uniform_s: of that group, medians over all steps of all turns. `forecast_error`: of a turn, over the
    forecast as it was made; `forecast_error_at_one_speed`: over one whose computing takes as much longer as the
    yardstick took in that round; `slowdown`: how much longer that was, by group and round.
    """
    groups = [group.figures for group in measured]
    times = [{name: _median(turns) for name, turns in group.items() if "error" not in turns[0]} for group in groups]
    by_hand = [{name: s for name, s in group.items() if name != AUTO.name} for group in times]
    left_out = {n: t[0]["error"] for group in groups for n, t in group.items() if "error" in t[0]}
    if not any(by_hand):
        raise SystemExit(
            f"{one}: wanted a method by hand that lasts beside auto, every one ended: {left_out}; try more"
        )
    worst = max((at for at in range(len(groups)) if by_hand[at]), key=lambda at: _behind(times[at], by_hand[at]))
    best = min(by_hand[worst], key=lambda name: by_hand[worst][name])
    auto = [group[AUTO.name] for group in groups]
    firsts = [turns[0] for turns in auto]
    return {
        "model": one.model,
        "hosts": one.hosts,
        "rate": one.rate,
        "round_trip_ms": one.round_trip_ms,
        "auto_s": times[worst][AUTO.name],
        "best_uniform": best,
        "best_uniform_s": by_hand[worst][best],
        "behind": _behind(times[worst], by_hand[worst]),
        "forecast_s": median(r["forecast"]["step_s"] for r in firsts),
        "forecast_error": median(r["step_s"] / r["forecast"]["step_s"] - 1 for turns in auto for r in turns),
        "forecast_error_at_one_speed": median(
            r["step_s"] / _forecast_s(r["forecast"], slower) - 1
            for turns, group in zip(auto, measured, strict=True)
            for r, slower in zip(turns, group.slowdown, strict=True)
        ),
        "slowdown": [[round(slower, 3) for slower in group.slowdown] for group in measured],
        "exposed_s": median(r["exposed_s"] for r in firsts),
        "forecast_exposed_s": median(r["forecast"]["exposed_s"] for r in firsts),
        "compute_s": median(r["compute_s"] for r in firsts),
        "forecast_compute_s": median(r["forecast"]["compute_s"] for r in firsts),
        "auto": [r["because"] for r in firsts],
        "tried": [r["tried"] for r in firsts],
        "step_s": [{name: round(group[name], 4) for name in sorted(group, key=group.__getitem__)} for group in times],
        "wire_bytes": {n: t[0]["wire_bytes"] for group in groups for n, t in group.items() if "error" not in t[0]},
        "left_out": left_out,
    }


def _forecast_s(forecast: Mapping[str, float], slower: float) -> float:
    """Return the seconds of a step that were forecast, with computing `slower` times as long."""
    return forecast["step_s"] + forecast["compute_s"] * (slower - 1)


def _median(turns: Sequence[dict[str, Any]]) -> float:
    return median(s for turn in turns for s in turn["steps_s"])


def _behind(times: Mapping[str, float], by_hand: Mapping[str, float]) -> float:
    return times[AUTO.name] / min(by_hand.values()) - 1
