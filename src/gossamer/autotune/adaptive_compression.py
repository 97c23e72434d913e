"""Adaptive compression (`plan.adapt`): sum mean gradients, measure settings on them, let the policy choose.

Before every choice the mean gradients of the last steps are summed as the optimizer received them: after clipping, so
that no single step dominates. They are the output of the current exchange: from one step alone, that exchange would
seem to lose nothing. Over a window, error feedback adds what single steps dropped.

Every rank measures some of the parameters, an all-gather combines the table, and the policy is a pure function of it.
So all ranks make the same choice. plan.yaml keeps it, and a resumed run continues with it. The sums are not saved: a
choice whose window was cut by a stop uses the remaining steps, and its reason says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.autotune.exchange_selection import ExchangeSelector
from gossamer.autotune.link_use import uplinks_downlinks_of
from gossamer.comm.bucket import Layout
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.policy import AdaptRule, Policy
from gossamer.recipe import ParameterRules, Recipe, RegisteredSettings
from gossamer.run.trainer_services import Replan
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import Exchanges, Written, told
from gossamer.spec.parameter_rules import LAST_RESORT, lines
from gossamer.spec.row_range import parts_in, whole_of
from gossamer.spec.statistics import Paths, Statistics
from gossamer.sync import GradientReducer

_KEY = "plan.adapt"
_WARM = 2  # exchanges before the one that is measured, of methods that refine what they send from step to step
_HIDDEN = 0.05  # weight of a byte whose time on the wire is fully hidden


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that one line of the plan serves, and the settings to choose from for them."""

    names: tuple[str, ...]
    level: str
    written: Written
    settings: tuple[Written, ...]


@dataclass(slots=True, kw_only=True)
class AdaptiveCompression:
    """The adaptive compression of one rank's gradient exchanges; all ranks must call `replan` at the same steps."""

    policy: Policy
    every: int
    window: int
    exchanger: ExchangeSelector
    replica: GradientReducer | None = None  # given when there is one
    _sums: dict[str, Tensor] = field(default_factory=dict)
    _count: int = 0
    _last: int = -1  # the step the window that is being filled ends with

    @staticmethod
    def of(recipe: Recipe, exchanger: ExchangeSelector) -> AdaptiveCompression | None:
        """Return the adaptive compression of a run; None if nothing is adapted between steps.

        Stage boundaries, and the exchange between islands in local-update training, are chosen before step 1.
        """
        section = recipe.config.plan
        if recipe.policy is None or recipe.in_stages or exchanger.methods.sync.loop is not None:
            return None
        return AdaptiveCompression(
            policy=recipe.policy,
            every=section.adapt_every,
            window=section.adapt_window,
            exchanger=exchanger,
        )

    def begin(self, replica: GradientReducer) -> None:
        """Prepare before the first step. Raises BadInput for settings that cannot be built."""
        self.replica = replica
        settings = {told(w): w for group in self._groups() for w in group.settings}
        for written in settings.values():
            ParameterRules.read(written, key=_KEY)
        if not settings and not self.policy.needs_paths:
            self.exchanger.tell(f"nothing is adapted: {told(self._base)} has neither a rank nor a codec to vary", 0)

    def replan(self, step: int) -> Replan | None:
        """Return the newly chosen exchange after `step`, once its update is made; None for no change."""
        groups = self._groups()
        measured = any(group.settings for group in groups)
        if measured:
            self._collect(step)
        if step % self.every or not (self._count or self.policy.needs_paths):
            return None
        written, said = self._by_group(groups) if measured else self._for_all()
        if 0 < self._count < self.window:
            said += f" (from {self._count} steps of {self.window}, as the run was stopped or steps were rejected)"
        self.forget()
        return self.exchanger.change(written, step, f"adapted: {said}", adapted_from=self._base)

    def forget(self) -> None:
        """Discard the summed gradients, e.g. because the exchange has changed."""
        self._sums, self._count, self._last = {}, 0, -1

    @property
    def _reducer(self) -> GradientReducer:
        """The reducer of the run's gradients, known once `begin` was called."""
        assert self.replica is not None
        return self.replica

    @property
    def _base(self) -> Exchanges:
        return self.exchanger.plan.adapted_from or self.exchanger.plan.exchange

    def _groups(self) -> list[_Group]:
        found = lines(self._base, key="plan.exchange")
        served: dict[int, list[str]] = {}
        for name in self._reducer.names:
            line = exchange_methods.matching_rule(found, name)
            if line is not None:
                served.setdefault(found.index(line), []).append(name)
        near = RegisteredSettings()
        return [
            _Group(tuple(names), found[i].level, found[i].written, self.policy.to_measure(found[i].written, near))
            for i, names in sorted(served.items())
        ]

    @torch.no_grad()
    def _collect(self, step: int) -> None:
        last = -(-step // self.every) * self.every
        if last != self._last:
            self.forget()
            self._last = last
        if step <= last - self.window:
            return
        for name, gradient in self._reducer.gradients().items():
            if name in self._sums:
                self._sums[name] += gradient
            else:
                self._sums[name] = gradient.to(torch.float32, copy=True)
        self._count += 1

    def _for_all(self) -> tuple[Exchanges, str]:
        numel = tuple(p.numel() for p in self._reducer.gradients().values())
        names = self._reducer.names
        choices = self.policy.choose(Statistics(names=names, numel=numel), self._paths())
        return _shortest(list(choices.rules)), choices.reason

    def _by_group(self, groups: list[_Group]) -> tuple[Exchanges, str]:
        asked, paths, said = [g for g in groups if g.settings], self._paths(), []
        chosen: dict[str, tuple[str, Written]] = {}
        for group, statistics in zip(asked, self._measure(asked), strict=True):
            choices = self.policy.choose(statistics, paths)
            said.append(choices.reason)
            for name in group.names:
                written = _first(choices.rules, name)
                if written != group.written:
                    chosen[name] = (group.level, written)
        return self._with(chosen), "; ".join(said)

    def _with(self, chosen: Mapping[str, tuple[str, Written]]) -> Exchanges:
        """Return the chosen rules, then those rules of the base that still serve a parameter or a part of one."""
        before = lines(self._base, key="plan.exchange")
        served = (*self._reducer.names, *parts_in(self.exchanger.plan.buckets))
        left = {exchange_methods.matching_rule(before, name) for name in served if whole_of(name) not in chosen}
        found: list[AdaptRule] = []
        for level, written in {(level, told(w)): (level, w) for level, w in chosen.values()}.values():
            names = [n for n, one in chosen.items() if one == (level, written)]
            found.append((f"^({'|'.join(map(re.escape, names))})$", level, written))
        for line in before:
            if line in left or line.level == "intra" or line.pattern == LAST_RESORT:
                found.append((line.pattern or LAST_RESORT, line.level, line.written))
        return _shortest(found)

    def _measure(self, groups: list[_Group]) -> list[Statistics]:
        """Return the same statistics on every rank: one rank measures each parameter, the others add zeros."""
        rank, ranks, tables = self._reducer.rank, self._reducer.ranks, []
        for group in groups:
            table = torch.zeros(2, len(group.names), len(group.settings), dtype=torch.float64)
            by_size = sorted(range(len(group.names)), key=lambda i: -self._sums[group.names[i]].numel())
            for i in by_size[rank::ranks]:
                gradient = self._sums[group.names[i]] / self._count
                table[:, i] = _measured(group.names[i], gradient, group.settings, self._reducer.levels)
            tables.append(table)
        mine = torch.cat([table.flatten() for table in tables])
        total = self._reducer.gather(tuple(mine.tolist())).sum(0)
        cut = torch.split(total, [table.numel() for table in tables])  # type: ignore[no-untyped-call]
        return [self._statistics(g, c.view_as(t)) for g, c, t in zip(groups, cut, tables, strict=True)]

    def _statistics(self, group: _Group, table: Tensor) -> Statistics:
        waited = self.exchanger.waited()
        known = all(name in waited for name in group.names)
        error, nbytes = table.tolist()
        return Statistics(
            names=group.names,
            numel=tuple(self._sums[name].numel() for name in group.names),
            candidates=group.settings,
            error=tuple(map(tuple, error)),
            nbytes=tuple(tuple(map(int, row)) for row in nbytes),
            default=group.settings[0],
            exposed=tuple(max(_HIDDEN, waited[name]) for name in group.names) if known else (),
        )

    def _paths(self) -> Paths:
        return uplinks_downlinks_of(self.exchanger.links()) if self.policy.needs_paths else Paths()


def inter_island_policy(recipe: Recipe) -> Policy | None:
    """Return the policy for the exchange between islands in local-update training; None if there is none."""
    return recipe.policy if recipe.sync.loop is not None else None


def replan_callback(
    exchanger: ExchangeSelector, adapting: AdaptiveCompression | None
) -> Callable[[int, float, float], Replan | None]:
    """Return the function that the trainer calls between steps to change the exchange.

    Drifted links come first: their new choice makes the adapted settings obsolete.
    """
    if adapting is None:
        return exchanger.replan

    def replan(step: int, compute_s: float, exposed_s: float) -> Replan | None:
        changed = exchanger.replan(step, compute_s, exposed_s)
        if changed is None:
            return adapting.replan(step)
        adapting.forget()
        return changed

    return replan


def _measured(name: str, gradient: Tensor, settings: tuple[Written, ...], levels: ProcessGroups) -> Tensor:
    """Return (2, settings): each setting's error on this gradient, without error feedback, and the bytes it sends."""
    where, rows = Layout.of({name: gradient}), []
    for written in settings:
        whole = ParameterRules.single(written)
        bare = _bare(whole)
        warm = _WARM if any(True for _ in bare.init(where).flatten()) else 0
        try:
            whole.check(where, levels)
            error = exchange_methods.error_of(bare, gradient, name=name, warm=warm)
        except BadInput:
            error = float("nan")  # it cannot serve this parameter
        rows.append((error, float(exchange_methods.bytes_of(whole, where, levels))))
    return torch.tensor(rows, dtype=torch.float64).T


def _bare(exchange: Exchange) -> Exchange:
    """Return the exchange inside all error feedback.

    In a second exchange, feedback would add the residual of the first.
    """
    if not exchange.traits.remembers:
        return exchange
    inner = [v for f in fields(exchange) if isinstance(v := getattr(exchange, f.name), Exchange)]  # type: ignore[arg-type]
    return _bare(inner[-1]) if inner else exchange


def _first(rules: tuple[AdaptRule, ...], name: str) -> Written:
    return next(written for pattern, _, written in rules if re.search(pattern, name))


def _shortest(rules: list[AdaptRule]) -> Exchanges:
    """Return a single method if it serves all parameters, else the rules."""
    if len(rules) == 1 and rules[0][:2] == (LAST_RESORT, "all"):
        return rules[0][2]
    return rules
