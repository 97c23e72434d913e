"""The all-gathers beside the buckets of a step: the ranks' weights, their votes, and rows of numbers for anybody."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.comm.comm_thread import CommStep, CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.comm.row_gather import gather_rounds, gather_rows
from gossamer.sync._step_vote import GradientReport, StepAgreement, StepBallot, StepContext, StepVote, row_of
from gossamer.sync._timing import Timing


class StepGathers:
    """The gathers of one rank's steps: every rank's share of the batch, and the votes before the update.

    `levels` stay those of the start until `relevel`. `timing` counts the time waited.
    """

    def __init__(self, pump: CommThread, timing: Timing) -> None:
        self.rank = pump.channel.rank
        self.levels: ProcessGroups = pump.channel.levels
        self.ranks = len(self.levels.everyone)
        self.window = StepContext(0, 0, 0.0, 0.0)
        self._pump, self._timing = pump, timing
        self._weights: Tensor | None = None
        self._weighing = CommStep(())

    def relevel(self) -> None:
        """Take over the channel's process groups, where more have been added since."""
        self.levels = self._pump.channel.levels

    def begin(self, window: StepContext) -> None:
        """Start a step: gather every rank's weight without waiting for it."""
        self.window, self._weights = window, None
        self._weighing = self._pump.begin((self._rounds(self._voting),))
        mine = torch.tensor((window.weight,), dtype=torch.float64)
        self._weighing.submit(0, gather_rows(mine, self.levels, self._voting, self.rank))

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks whose gradients are averaged in the step, and that hold the same parameters."""
        return tuple(self.levels.group(self.window.level, self.rank))

    @property
    def _voting(self) -> str:
        """Return the level of the ranks that vote in the step."""
        return self.levels.whole if self.window.level == "all" else self.window.level

    def weights(self) -> Tensor:
        """Return the valid labels of every rank that votes in the step, (ranks,) float64, once all are gathered.

        They are 0 for the other ranks.
        """
        if self._weights is None:
            told = self._timing.timed_wait(lambda: self._weighing.result(0)).mean.flatten()
            self._weights = torch.zeros(self.ranks, dtype=torch.float64)  # (ranks,)
            self._weights[list(self.levels.group(self._voting, self.rank))] = told
        return self._weights

    def labels(self) -> float:
        """Return the valid labels of all ranks whose gradients are averaged; wait for the last rank's."""
        return float(self.weights()[list(self.members)].sum())

    def shares(self) -> Tensor:
        """Return every rank's share of the step's valid labels, (ranks,) float64.

        In a local step it is 0 for ranks of other islands.
        """
        weights, members = self.weights(), list(self.members)
        total = weights[members].sum()
        return weights / total if total > 0 else torch.full_like(weights, 1 / len(members))

    def agree(self, vote: StepVote, report: GradientReport, names: Sequence[str], *, one_mean: bool) -> StepAgreement:
        """Exchange votes and return their outcome. `names`: the parameters; `one_mean`: a group has the same gradients.

        Raise WireMismatch where ranks are at different steps.
        """
        row = row_of(self.window.step, vote, float(self.weights()[self.rank]), report)
        mine, more = torch.tensor(row, dtype=torch.float64), [] if vote.beside is None else [vote.beside]
        before_s = self._timing.exposed_s
        votes, *beside = self._timing.timed_wait(lambda: self._gathered([mine, *more], self._voting))  # (voters, 5)
        self._timing.agreed_s += self._timing.exposed_s - before_s
        voters, groups = self.levels.everyone, self.levels.groups["all"]  # each group has one mean: a part of the model
        if self.window.level != "all":  # or a model of its own
            voters = self.levels.group(self.window.level, self.rank)
            groups = (voters,)
        ballot = StepBallot(votes, voters)
        ballot.check(self.window.step)
        firsts = [voters.index(group[0]) for group in groups]
        if not one_mean or vote.squared is not None:  # each speaks for its own part
            firsts = list(range(len(voters)))
        idle = self._idle_everywhere(names, report.idle, ballot.marks(self.members))
        return ballot.verdict(firsts, idle, beside[0] if beside else None)

    def _idle_everywhere(self, names: Sequence[str], idle: frozenset[str], marks: Tensor) -> frozenset[str]:
        """Return the parameters that are idle on all ranks; gather their names only where the ranks' marks differ."""
        if bool((marks == marks[0]).all()):
            return idle
        bits = torch.tensor([name in idle for name in names], dtype=torch.uint8)
        (rows,) = self._gathered([bits], self.window.level)  # (ranks, parameters)
        everywhere = rows.view(-1, len(bits)).all(0).tolist()
        return frozenset(name for name, alone in zip(names, everywhere, strict=True) if alone)

    def gather(self, row: tuple[float, ...], level: str = "") -> Tensor:
        """Return the `row` of every rank, or of those at `level`, (ranks, len(row)) float64.

        All of them must call it, and not between the begin of a step's exchanges and their end.
        """
        return self._gathered([torch.tensor(row, dtype=torch.float64)], level or self.levels.whole)[0]

    def _gathered(self, mine: Sequence[Tensor], level: str) -> list[Tensor]:
        """Gather each tensor over the ranks at `level`, all of them at once, and return them stacked."""
        step = self._pump.begin((self._rounds(level),) * len(mine))
        for job, tensor in enumerate(mine):
            step.submit(job, gather_rows(tensor, self.levels, level, self.rank))
        return [step.result(job).mean for job in range(len(mine))]

    def _rounds(self, level: str) -> int:
        return gather_rounds(self.levels, level, self.rank)
