"""The rounds of a run as the quorum thread of a rank sends them, which may be ahead of what the rank has applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gossamer.sync._fragments import FragmentProgress, SyncLaunch
from gossamer.sync._quorum import RoundDeadline, RoundQuorum
from gossamer.sync._sync_round import LocalContribution, RoundSender


@dataclass(frozen=True, slots=True)
class QuorumRounds:
    """The rounds that end after more than `done` of a run's `steps`. `courses`: the progress of each fragment."""

    sender: RoundSender
    done: int
    steps: int
    seed: int
    courses: Sequence[FragmentProgress]

    @staticmethod
    def of(sender: RoundSender, done: int, steps: int, seed: int) -> QuorumRounds:
        """Build the rounds that follow the fragments' progress of now."""
        found = [FragmentProgress(f.rounds, [part.state for part in f.parts], f.flight) for f in sender.fragments]
        return QuorumRounds(sender, done, steps, seed, found)

    def deadlines(self) -> Iterator[RoundDeadline]:
        """Yield the ends of the rounds, in order."""
        for at in range(self.done + 1, self.steps + 1):
            due = RoundDeadline(at, 4 * len(self.sender.due(at, last=at == self.steps)), at == self.steps)
            if due.width:
                yield due

    def contribute(self, call: RoundQuorum, gone: LocalContribution | None) -> list[SyncLaunch]:
        """Send this rank's contribution, on the quorum thread; zeros of a rank that is late."""
        last = call.step == self.steps
        leaving = self.sender.due(call.step, last=last)
        mine = [self.courses[self.sender.fragments.index(fragment)] for fragment in leaving]
        if gone is None:
            zeros = [[torch.zeros_like(part.anchor) for part in fragment.parts] for fragment in leaving]
            gone = LocalContribution(zeros, [False] * len(leaving))
        found = self.sender.contribute(leaving, mine, call.rows, gone, call.step, self.seed, last=last)
        for course, departed in zip(mine, found, strict=True):
            course.next(departed)
        return found
