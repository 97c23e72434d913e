"""What `plan.exchange: auto` chooses, over a grid of ranks, rates and latencies, beside the best uniform setting.

    python benchmarks/auto.py --lab [--settings gpt2:2:100mbit:10,llama:4:1gbit:0] [--turns 5] [--steps 4] [--json]
    python benchmarks/auto.py [--quick] [--models gpt2,llama,wide] [--ranks 2,4] [--rates 1e8,1e9] [--latencies 1e-3]
                              [--speedups 1,33] [--lossy true,false] [--processes 1] [--json]
    python benchmarks/auto.py --random 200 [--seed 0] [--json]

Each row is a point of the grid: a model, what its device is faster by, the bits per second of every rank's link, the
seconds that a small message takes. `auto_s` is a step with what auto chooses from the same measurements as in a run;
`best_uniform_s` that of the best of all candidates allowed, each alone in buckets of 1, 4, 16 or 25 MiB, of a quarter
of the gradients, or of all, both as equal as they come and tapered as those of a run by hand. Both are timed by the
independent simulator (`auto/simulator.py`), which shares no code with the forecast; a message takes PRICE of a rank's
processors in both. `forecast_s` is what auto itself forecasts. Encoding is timed on this machine, for each number of
ranks; gradients are Gaussian, and become ready in proportion to their size, the last parameter first.

`behind`: of how many points auto is more than 5% above the best; `forecast_off`: of how many the forecast is more than
10% off the simulated step; `worst`: the point that is furthest behind. `choose_s`: seconds of the slowest choice.

With --random, rows are points drawn at random (`auto/drawn.py`): of models of five kinds, on any number of ranks, on
links of one kind or between islands of ranks, twice each: lossy and exact. Only the whole grid is recorded.

With --lab, real hosts train on links that are shaped (needs root, Linux): a row is a model, hosts, the rate of each
host's link and the milliseconds of a round trip; auto and every candidate named by hand for all gradients train at
once, in turns of a few steps. `behind` is then auto's measured step over the best of those, less 1; `forecast_error`
measured over forecast, less 1; `forecast_error_at_one_speed` the same on a machine that is as fast as when auto made
its forecast, by a yardstick: hosts that exchange nothing, in turns before, after and beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, product
from multiprocessing import get_context
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from auto.drawn import draw
from auto.simulator import Job, Link, Message, gather, ring, shuffle, simulate
from gossamer.autotune import exchange_profile
from gossamer.autotune.exchange_profile import ExchangeProfile
from gossamer.autotune.link_use import LARGEST_BUCKET_BYTES
from gossamer.comm.bucket import Layout, partition
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.message import Collective, ProcessGroups, Traffic
from gossamer.exchange import Exchange
from gossamer.plan.exchange import CANDIDATES, Candidate, MessagePrice, StepMeasurements, across_islands, choose
from gossamer.recipe import ParameterRules
from gossamer.run.profile_step import StepProfile
from gossamer.spec import network
from gossamer.spec.row_range import RowRange
from result import publish

RANKS = (2, 3, 4, 8, 16, 64, 256, 1024)
RATES = (1e7, 1e8, 1e9, 1e10, 4e11)  # bits per second
LATENCIES = (5e-5, 1e-3, 1e-2, 1e-1)
QUICK = {"ranks": (2, 16, 256), "rates": (3e7, 1e9, 1e11), "latencies": (1e-4, 2e-2)}
BEHIND, OFF = 0.05, 0.10
HAND_BYTES = 25 << 20  # what a bucket has in torch's DDP
PRICE = MessagePrice(start_s=7e-4, byte_s=4e-10)  # as measured on this machine, two processes of one core each
OVERLAP = 2 / 3  # of a step: its last backward pass


@dataclass(frozen=True)
class Shape:
    """A model: its parameters, without values, and the seconds that a step computes.

    `costs`: what each takes of the backward pass, in any unit; empty: in proportion to its size.
    """

    params: Mapping[str, Tensor]
    compute_s: float
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def ready_s(self) -> dict[str, float]:
        """When each gradient is complete, in seconds of the last backward pass."""
        costs = self.costs or {name: p.numel() for name, p in self.params.items()}
        total, done, found = sum(costs.values()), 0.0, {}
        for name in reversed([*self.params]):
            done += costs[name]
            found[name] = OVERLAP * self.compute_s * done / total
        return found


def gpt2() -> Shape:
    """GPT-2 of 17.4 million parameters with tied embeddings, as in benchmarks/links.py."""
    from links.setting import module

    return Shape(_named(module("gpt2")), 1.49)


def llama() -> Shape:
    """A Llama of 12.9 million parameters with untied embeddings: the head's gradient is ready first, the rows' last."""
    from links.setting import module

    return Shape(_named(module("llama")), 0.99)


def wide() -> Shape:
    """A convolutional classifier of many small tensors, and one that is 90% of all: the first layer of its head."""
    layers = [nn.Conv2d(64, 64, 3) for _ in range(30)]
    return Shape(_named(nn.Sequential(*layers, nn.Linear(3136, 3200), nn.Linear(3200, 10))), 0.8)


MODELS = {"gpt2": gpt2, "llama": llama, "wide": wide}


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--quick", action="store_true", help="few points")
    read.add_argument("--models", default="gpt2,llama,wide")
    for name, usual in (("ranks", RANKS), ("rates", RATES), ("latencies", LATENCIES), ("speedups", (1, 33))):
        read.add_argument(f"--{name}", default=",".join(f"{one:g}" for one in usual))
    read.add_argument("--lossy", default="true,false")
    read.add_argument("--random", type=int, default=0, help="so many points drawn at random, in place of the grid")
    read.add_argument("--seed", type=int, default=0, help="of the points drawn at random")
    read.add_argument(
        "--processes", type=int, default=1, help="models at once; choose_s is then that of a busy machine"
    )
    read.add_argument("--json", action="store_true", help="nothing but the last line")
    read.add_argument("--lab", action="store_true", help="measured on links of the laboratory")
    read.add_argument("--settings", default="", help="of the laboratory; all by default")
    read.add_argument("--by-hand", default="", help="of the laboratory: names, such as int8,ACP; all by default")
    read.add_argument("--turns", type=int, default=5)
    read.add_argument("--record", default="auto_lab", help="of the laboratory: name of the file in docs/results")
    read.add_argument("--steps", type=int, default=4, help="of a turn in the laboratory; the first does not count")
    asked = read.parse_args()
    if asked.lab:
        in_lab(asked)
        return
    begin()
    axes = {name: [float(one) for one in getattr(asked, name).split(",")] for name in ("ranks", "rates", "latencies")}
    axes |= {name: list(ones) for name, ones in QUICK.items()} if asked.quick else {}
    rows = list[dict[str, Any]]()
    speedups, lossy = [float(s) for s in asked.speedups.split(",")], asked.lossy.split(",")
    models = asked.models.split(",")
    if asked.processes > 1 and not asked.random:
        with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
            each = [pool.submit(grid_alone, name, axes, speedups, lossy, asked.json) for name in models]
            rows += [row for one in each for row in one.result()]
    else:
        drawn = chain.from_iterable(grid(name, axes, speedups, lossy) for name in models)
        for row in islice(at_random(asked.seed), asked.random) if asked.random else drawn:
            rows.append(row)
            if not asked.json:
                print_aside(said(row))
    figures = {"points": len(rows), **summary(rows), "rows": rows}
    is_whole = all(getattr(asked, name) == read.get_default(name) for name in ("models", "lossy", "speedups", *axes))
    publish("auto", figures) if is_whole and not (asked.quick or asked.random) else print(json.dumps(figures))


def begin() -> None:
    """Let this process time encoding as a rank of one core does, which has none for it alone."""
    torch.set_num_threads(1)
    exchange_profile.encode_slowdown = lambda: 1.0


def grid_alone(
    name: str, axes: Mapping[str, Sequence[float]], speedups: Sequence[float], lossy: Sequence[str], is_quiet: bool
) -> list[dict[str, Any]]:
    """Return the rows of one model, in a process of their own."""
    begin()
    rows = list[dict[str, Any]]()
    for row in grid(name, axes, speedups, lossy):
        rows.append(row)
        if not is_quiet:
            print_aside(said(row))
    return rows


def in_lab(asked: argparse.Namespace) -> None:
    """Measure auto beside what is named by hand, on real links; keep each row as it is found."""
    from auto import lab

    settings = [lab.Setting.read(text) for text in asked.settings.split(",") if text] or lab.SETTINGS
    rows = list[dict[str, Any]]()
    named = [one for one in lab.BY_HAND if any(part in one.name for part in asked.by_hand.split(","))]
    for row in lab.rows(settings, named, turns=asked.turns, steps=asked.steps, say=print_aside):
        rows.append(row)
        if not asked.json:
            print_aside(json.dumps(row, indent=1))
    figures = {
        "settings": len(rows),
        "worst_behind": max(row["behind"] for row in rows),
        "worst_forecast_error": max((row["forecast_error"] for row in rows), key=abs),
        "worst_forecast_error_at_one_speed": max((row["forecast_error_at_one_speed"] for row in rows), key=abs),
        "rows": rows,
    }
    publish(asked.record, figures, script="auto")


def print_aside(line: str) -> None:
    """Print to where figures are not expected."""
    print(line, file=sys.stderr, flush=True)


def grid(
    name: str, axes: Mapping[str, Sequence[float]], speedups: Sequence[float], lossy: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model."""
    shape = MODELS[name]()
    first = profiled(shape, CANDIDATES)
    for ranks in map(int, axes["ranks"]):
        profile = replace(first, pump=pump_of(ProcessGroups.flat(ranks)), _cuts={}, _columns={}, _times={}, _traffic={})
        made = dict[Any, Any]()
        for rate, latency_s, speedup in product(axes["rates"], axes["latencies"], speedups):
            link = network.Link(latency_s=latency_s, bytes_per_s=rate / 8)
            links = network.Network(islands=(tuple(range(ranks)),), levels={"all": link})
            point = Point(shape, profile, links, speedup, made=made)
            for allowed in lossy:
                row = {"model": name, "ranks": ranks, "rate": rate, "latency_s": latency_s, "speedup": speedup}
                yield row | {"lossy": allowed == "true"} | point.measured(lossy=allowed == "true")


def at_random(seed: int) -> Iterator[dict[str, Any]]:
    """Yield rows of points drawn at random, without an end."""
    rng = Random(seed)
    while True:
        one = draw(rng)
        params, ends = {n: torch.empty(shape) for n, shape in one.model.shapes.items()}, [*accumulate(one.islands)]
        shape = Shape(params, one.model.compute_s, one.model.costs)
        islands = tuple(tuple(range(end - size, end)) for size, end in zip(one.islands, ends, strict=True))
        has_islands = len(islands) > 1
        candidates = across_islands(CANDIDATES) if has_islands else CANDIDATES
        groups = ProcessGroups.islands(islands) if has_islands else ProcessGroups.flat(ends[-1])
        profile, made = replace(profiled(shape, CANDIDATES), pump=pump_of(groups)), dict[Any, Any]()
        for links in one.links:
            far = network.Link(latency_s=links.latency_s, bytes_per_s=links.rate / 8)
            near = network.Link(latency_s=links.near[1], bytes_per_s=links.near[0] / 8)
            levels = {"all": far, "island": near, "between": far} if has_islands else {"all": far}
            here = network.Network(islands=islands, levels=levels)
            point = Point(shape, profile, here, links.speedup, candidates, made=made)
            for lossy in (True, False):
                numel = sum(p.numel() for p in params.values())
                row: dict[str, Any] = {"model": one.model.kind, "tensors": len(params), "numel": numel}
                row |= {"ranks": ends[-1], "islands": [*one.islands], "rate": links.rate, "latency_s": links.latency_s}
                row |= {"near": list(links.near)} if has_islands else {}
                yield row | {"speedup": links.speedup, "lossy": lossy} | point.measured(lossy=lossy)


def profiled(shape: Shape, candidates: Sequence[Candidate]) -> ExchangeProfile:
    """Return the profile of a model whose gradients are Gaussian, without the times of encoding."""
    torch.manual_seed(0)
    gradients = {n: torch.randn(p.shape) for n, p in shape.params.items()}
    rehearsal = StepProfile(shape.compute_s, OVERLAP * shape.compute_s, shape.ready_s, gradients)
    return ExchangeProfile.by(rehearsal, shape.params, candidates, pump_of(ProcessGroups.flat(2)), knows=True)


def pump_of(groups: ProcessGroups) -> Any:
    """One rank among so many, whose messages are answered at once: encoding is timed, nothing is sent."""
    return SimpleNamespace(channel=LoopbackChannel(0, groups))


@dataclass
class Point:
    """A point of the grid. Times of encoding and of the step are divided by `speedup`."""

    shape: Shape
    profile: ExchangeProfile
    links: network.Network
    speedup: float
    candidates: Sequence[Candidate] = CANDIDATES
    timed: dict[tuple[str, str], float] = field(default_factory=dict)  # uniform steps, by candidate and buckets
    made: dict[Any, Any] = field(default_factory=dict)  # what is the same on all links: hand cuts, and their jobs

    def measured(self, *, lossy: bool) -> dict[str, Any]:
        """Return the figures of the row."""
        candidates = self.candidates
        cuts = self.profile.facts(self.links, candidates, LARGEST_BUCKET_BYTES, price=PRICE, divides=True)
        facts = [faster(one, self.speedup) for one in cuts]
        began = time.process_time()
        decision = choose(*facts, lossy=lossy, candidates=candidates)
        choose_s = time.process_time() - began
        best = decision.best
        jobs = [self.job(b.names, b.ready_s, c) for b, c in zip(best.facts.buckets, best.picked, strict=True)]
        uniform = self.uniform([c for c, one in enumerate(candidates) if c == 0 or one.lossy <= lossy])
        name, best_s = min(uniform.items(), key=lambda item: item[1])
        return {
            "auto": decision.reason,
            "auto_s": self.simulated(jobs, decision.turns),
            "forecast_s": decision.forecast.step_s,
            "lost": best.lost,
            "best_uniform": name,
            "best_uniform_s": best_s,
            "choose_s": choose_s,
        }

    def uniform(self, candidates: Sequence[int]) -> dict[str, float]:
        """Return the simulated step of every candidate alone, in buckets of every size named by hand."""
        jobs = {
            (self.candidates[c].said, said): made
            for said, layouts in self.hand_cuts.items()
            for c in candidates
            if (made := self.jobs_of(c, layouts)) is not None
        }
        least, found = {key: self.least_s(made) for key, made in jobs.items()}, dict[str, float]()
        for key in sorted(jobs, key=lambda one: least[one]):
            if least[key] > min(found.values(), default=least[key]):
                break  # what is left is longer
            if key not in self.timed:
                self.timed[key] = self.simulated(jobs[key])
            found[", ".join(key)] = self.timed[key]
        return found

    def least_s(self, jobs: Sequence[Job]) -> float:
        """Return what no step with `jobs` is shorter than: as if one link or one bucket were all that there is."""
        sent, alone, backward_s = dict[str, float](), 0.0, OVERLAP * self.shape.compute_s / self.speedup
        for job in jobs:
            end_s = job.ready_s + sum(job.turns)
            for one in job.messages:
                link = self.links.levels[one.wire]
                sent[one.wire] = sent.get(one.wire, 0.0) + one.nbytes / link.bytes_per_s
                end_s += one.nbytes / link.bytes_per_s + one.hops * link.latency_s
            alone = max(alone, end_s)
        first_s = min(job.ready_s for job in jobs)
        after_s = max(alone, *(first_s + s for s in sent.values()), first_s + sum(sum(job.turns) for job in jobs))
        return (self.shape.compute_s / self.speedup - backward_s + max(backward_s, after_s)) * (1 - 1e-9)

    @property
    def hand_cuts(self) -> dict[str, tuple[Layout, ...]]:
        """Return the buckets of every size named by hand, as equal as they come and tapered."""
        if "hand" not in self.made:
            self.made["hand"] = self._hand_cuts()
        found: dict[str, tuple[Layout, ...]] = self.made["hand"]
        return found

    def _hand_cuts(self) -> dict[str, tuple[Layout, ...]]:
        found, total = dict[str, tuple[Layout, ...]](), sum(p.numel() * 4 for p in self.shape.params.values())
        for size in sorted({min(total, s) for s in (1 << 20, 1 << 22, 1 << 24, HAND_BYTES, -(-total // 4), total)}):
            for said, at_least in (("", 1), (" tapered", 4)):
                layouts = partition(self.shape.params, bucket_bytes=size, at_least=at_least)
                if layouts not in found.values():
                    found[f"{size / 2**20:.3g} MiB{said}"] = layouts
        return found

    def jobs_of(self, c: int, layouts: Sequence[Layout]) -> list[Job] | None:
        """Return the jobs of a candidate in all buckets; all-reduce in those that it cannot serve, None if it does in
        none.
        """
        served, jobs, exchange = False, list[Job](), built(self.candidates[c])
        times = bool(
            self.profile.encode_times(self.candidates[c], exchange).timed
        )  # none, where no sample can be served
        for where in layouts:
            names = tuple(e.name for e in where.entries)
            ready = max(self.shape.ready_s[n] for n in names)
            serves = times and self.profile.serves(self.candidates[c], where, exchange)
            served |= serves
            jobs.append(self._job(where, ready / self.speedup, self.candidates[c if serves else 0]))
        return jobs if served else None

    def job(self, names: Sequence[str], ready_s: float, c: int) -> Job:
        """Return the job of a bucket that auto has made."""
        return self._job(Layout.of({n: self._tensor(n) for n in names}), ready_s, self.candidates[c])

    def _tensor(self, name: str) -> Tensor:
        """Return a parameter, or the rows of one that `name` names."""
        part = RowRange.read(name)
        return self.shape.params[name] if part is None else self.shape.params[part.whole][part.start : part.stop]

    def _job(self, where: Layout, ready_s: float, candidate: Candidate) -> Job:
        exchange = built(candidate)
        key = candidate.said, where.entries
        if key not in self.made:
            self.made[key] = self._messages(exchange, where)
        messages = self.made[key]
        turns_s = self.profile.turn_seconds(candidate, exchange, where, len(messages) + 1)
        starts_s = (*(PRICE.of(one.nbytes) for one in messages), 0.0)  # on the host, however fast the device
        return Job(ready_s, tuple(s / self.speedup + own for s, own in zip(turns_s, starts_s, strict=True)), messages)

    def _messages(self, exchange: Exchange, where: Layout) -> tuple[Message, ...]:
        levels = self.profile.pump.channel.levels
        by_size = sorted(levels.groups.get("island", ((0,),)), key=len)
        peers = {*by_size[0], *by_size[-1], *min(by_size)}  # of whom some own more to send on, and rank 0 is a hub
        each = [[message_of(one, levels, rank) for one in exchange.traffic(where, levels, rank)] for rank in peers]
        return tuple(max(turn, key=lambda one: one.nbytes) for turn in zip(*each, strict=True))

    def simulated(self, jobs: Sequence[Job], turns: Sequence[int] = ()) -> float:
        """Return the simulated seconds of a step; without turns, what is ready goes first."""
        step = simulate(
            jobs,
            links={
                wire: Link(self.links.levels[wire].latency_s, self.links.levels[wire].bytes_per_s)
                for wire in {"all", "island"} & set(self.links.levels)
            },
            compute_s=self.shape.compute_s / self.speedup,
            backward_s=OVERLAP * self.shape.compute_s / self.speedup,
            stolen=1.0,
            order=tuple(turns) or "ready",
        )
        return step.step_s


_BUILT = dict[str, Exchange]()


def built(candidate: Candidate) -> Exchange:
    """Return the exchange of a candidate, built once."""
    if candidate.said not in _BUILT:
        _BUILT[candidate.said] = ParameterRules.single(candidate.written)
    return _BUILT[candidate.said]


def message_of(one: Traffic, levels: ProcessGroups, rank: int) -> Message:
    """Return the message of `rank`, by the simulator's own formulas. Rank 0 is a star's hub."""
    group, wire = levels.group(one.level, rank), "island" if one.level == "island" else "all"
    if one.splits is not None:
        me, arriving = group.index(rank), one.arriving or one.splits
        return Message(max(sum(own) - own[me] for own in (one.splits, arriving)) * one.itemsize, 1, wire)
    of = {Collective.GATHER: gather, Collective.SHUFFLE: shuffle}.get(one.combine, ring)
    (message,) = of(one.nbytes, len(group), wire=wire)
    return message


def faster(facts: StepMeasurements, speedup: float) -> StepMeasurements:
    """Return the measurements of a device that computes and encodes faster, on the same links."""
    buckets = tuple(
        replace(
            b,
            ready_s=b.ready_s / speedup,
            options=tuple(o and replace(o, turns_s=tuple(s / speedup for s in o.turns_s)) for o in b.options),
        )
        for b in facts.buckets
    )
    return replace(facts, buckets=buckets, compute_s=facts.compute_s / speedup, backward_s=facts.backward_s / speedup)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far auto is behind, and how far its forecast is off."""

    def ratio(row: Mapping[str, Any]) -> float:
        return row["auto_s"] / row["best_uniform_s"]

    off = [row for row in rows if abs(row["forecast_s"] / row["auto_s"] - 1) > OFF]
    worst = max(rows, key=ratio)
    return {
        "behind": sum(ratio(row) > 1 + BEHIND for row in rows),
        "forecast_off": len(off),
        "worst": worst,
        "worst_ratio": ratio(worst),
        "best_ratio": min(map(ratio, rows)),
        "choose_s": max(row["choose_s"] for row in rows),
    }


def said(row: Mapping[str, Any]) -> str:
    """Return the row as one line."""
    return (
        f"{row['model']} x{row['speedup']:g} {row['ranks']} ranks {row['rate'] / 1e6:g} Mbit/s "
        f"{1e3 * row['latency_s']:g} ms {'lossy' if row['lossy'] else 'exact'}: auto {row['auto_s']:.4g} s "
        f"(forecast {row['forecast_s']:.4g}), best {row['best_uniform_s']:.4g} s ({row['best_uniform']}), "
        f"{row['auto_s'] / row['best_uniform_s']:.3f}: {row['auto']}"
    )


if __name__ == "__main__":
    main()
