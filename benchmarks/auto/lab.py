"""What `plan.exchange: auto` measures on real rate-limited links, beside uniform settings named by hand.

Every row is a setting of the laboratory: a model, hosts, the rate of each host's link, the round trip between two. In
every turn each method trains from new, auto among them; the turns change who goes first, so that a machine that slows
down slows all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gossamer.plan.exchange import CANDIDATES
from links.method import Method
from links.rounds import Length, Link, measure

AUTO = Method("auto", False, {"exchange": "auto", "lossy": True})
BY_HAND = tuple(  # without those that the others beat on every link between few hosts, or that serve tables alone
    Method(one.said, False, {"exchange": one.written})
    for one in CANDIDATES
    if one.said not in ("recursive doubling", "star", "sparse all-reduce")
)
_UNSHAPED_STEP_S, _START_S, _SLOWEST_S = 1.5, 120.0, 60.0


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


def rows(
    settings: Sequence[Setting], methods: Sequence[Method], *, turns: int, steps: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row per setting: `auto_s` and `best_uniform_s` are medians over all steps of all turns."""
    for one in settings:
        found = defaultdict[str, list[dict[str, Any]]](list)
        for turn in range(turns):
            for method in (AUTO, *methods)[:: 1 if turn % 2 == 0 else -1]:
                if (result := _measured(method, one, steps)) is not None:
                    found[method.name].append(result)
                    say(f"{one}: {method.name} {result.get('error') or result['step_s']}")
        yield _row(one, found)


def _measured(method: Method, one: Setting, steps: int) -> dict[str, Any] | None:
    """Return a round's figures; None for one whose steps would take longer than it is worth: it cannot be the best."""
    rate = float(one.rate.removesuffix("mbit")) if one.rate.endswith("mbit") else 1e3 * float(one.rate[:-4])
    if method.plan["exchange"] == "dense" and 8 * 4 * 12.6 / rate > _SLOWEST_S:
        return None
    limit_s = _START_S + (steps + 2) * _SLOWEST_S
    return measure(method, one.link(), Length(steps, 2, limit_s), model=one.model)


def _row(one: Setting, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    steps_s = {name: [s for r in rounds for s in r.get("steps_s", ())] for name, rounds in found.items()}
    errors = {name: r["error"] for name, rounds in found.items() for r in rounds if "error" in r}
    times = {name: median(all_s) for name, all_s in steps_s.items() if all_s}
    auto = [r for r in found["auto"] if "error" not in r]
    by_hand = {name: seconds for name, seconds in times.items() if name != "auto"}
    best = min(by_hand, key=lambda name: by_hand[name])
    return {
        "model": one.model,
        "hosts": one.hosts,
        "rate": one.rate,
        "round_trip_ms": one.round_trip_ms,
        "auto_s": times["auto"],
        "best_uniform": best,
        "best_uniform_s": by_hand[best],
        "behind": times["auto"] / by_hand[best] - 1,
        "forecast_s": median(r["forecast"]["step_s"] for r in auto),
        "forecast_error": median(r["step_s"] / r["forecast"]["step_s"] - 1 for r in auto),
        "exposed_s": median(r["exposed_s"] for r in auto),
        "forecast_exposed_s": median(r["forecast"]["exposed_s"] for r in auto),
        "compute_s": median(r["compute_s"] for r in auto),
        "forecast_compute_s": median(r["forecast"]["compute_s"] for r in auto),
        "auto": [r["because"] for r in auto],
        "tried": [r["tried"] for r in auto],
        "step_s": {name: round(seconds, 4) for name, seconds in sorted(times.items(), key=lambda item: item[1])},
        "wire_bytes": {n: rounds[-1]["wire_bytes"] for n, rounds in found.items() if "error" not in rounds[-1]},
        "errors": errors,
    }
