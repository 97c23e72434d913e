"""Verify the ranks' gradients and parameters: others redo randomly drawn steps, and a majority names the faulty rank.

In a checked step (one in `every`, drawn once all gradients are sent, see random_beacon.py) every rank redoes the work
of two others, assigned anew each time. A rank's gradient then has three fingerprints: of what it sent, and of what two
other ranks compute. The outvoted rank is named, be it the one that worked or one that redid the work. Every rank also
sends a digest of its parameters, frozen ones too, and of its optimizer states. These are the same bits on all ranks: an
outvoted rank is named.

    row_i     = (loss, valid labels, |g_i|, p(g_i))          p: 64 random projections (ops/fingerprint.py)
    d(a, b)   = max(|loss_a - loss_b| / |loss|, |p_a - p_b| / |p|),   honest: d <= tolerance
    noise_i   = max d between rank i's reruns of one work, on several numbers of threads, and the median of all reruns
    tolerance = margin median of noise_i: no rank alone moves it. Before step 1; a rank far above it is named then
If three fingerprints do not agree, the noise is measured again on that very work before any rank is named.
Wire:    24 bytes per rank and step; a digest and three rows (1.6 kB) per rank and check.   State: one gradient.
Paper:   arXiv 2307.01898 asks for fingerprints and a majority of three; the algorithm is ours.
Not seen: a rank that reports a correct gradient and sends another. Then only the fact is known, not the rank: the mean
is not the sum of the reported gradients (with lossless exchanges). Two of three ranks that lie alike win.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.ops.fingerprint import digest
from gossamer.run.majority_vote import Majority, ThreeWayVote, distance
from gossamer.run.random_beacon import RandomBeacon
from gossamer.run.reexecution import ROW, Reexecution
from gossamer.sharding import ShardedOptimizer
from gossamer.spec import records
from gossamer.spec.config import VerifySection
from gossamer.spec.errors import Untrustworthy
from gossamer.spec.odd_one_out import outvoted
from gossamer.sync import GradientReducer

_EPS = 16  # units in the last place of float32 that are always forgiven
_RERUNS = (1, 2, 3)  # threads
_OUTLIER = 10  # times the noise of most, and a rank would not agree with them in a check either; or the margin, if more
_HOST_BYTES = 48


@dataclass(slots=True, kw_only=True)
class Verifier:
    """The verification of gradients and parameters on one rank.

    All ranks must call the same methods at the same steps. With `every` 0 the methods do nothing.
    """

    wanted: VerifySection
    witness: Reexecution
    replica: GradientReducer
    states: ShardedOptimizer
    sink: Callable[[records.Record], None]
    tolerance: float = 0.0
    _beacon: RandomBeacon = field(init=False)
    _hosts: list[str] = field(default_factory=list)
    _sound: int = -1  # the last step before which all held the same

    def __post_init__(self) -> None:
        self._beacon = RandomBeacon(self.replica.gather)

    def begin(self, step: int, *, scale: float = 1.0) -> None:
        """Prepare verification before the first step of this start.

        Gathers the host of every rank, and measures how much honest re-executions differ.
        """
        if not self.wanted.every:
            return
        name = socket.gethostname().encode("ascii", "replace")[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
        rows = self.replica.gather(tuple(map(float, name))).tolist()
        self._hosts = [bytes(map(int, row)).rstrip(b"\0").decode("ascii", "replace") for row in rows]
        reruns = self._reruns(step, replica=0, seed=0, scale=scale)
        center = reruns.flatten(0, 1).median(0).values
        noise = [max(distance(row, center) for row in rows) for rows in reruns]
        usual, far = max(_middle(noise), self._floor), max(_OUTLIER, self.wanted.tolerance_factor)
        self.tolerance = self.wanted.tolerance_factor * usual
        outliers = [rank for rank, n in enumerate(noise) if not n <= far * usual]
        named = {
            rank: [f"its gradient of rank 0's samples differs by {noise[rank]:.2g} of its norm from that of most ranks"]
            for rank in outliers
            if 2 * len(outliers) < len(noise)
        }
        said = f"verification: about 1 step in {self.wanted.every}, reruns of most ranks differ by {_middle(noise):.2g}"
        self._tell("info", step, f"{said}, up to {self.tolerance:.2g} is taken for noise")
        self._end(step, named, [])

    def check(self, step: int, loss: float, labels: float, *, scale: float) -> None:
        """Verify `step` if it is drawn, after its gradients are averaged and before the update.

        Raises Untrustworthy, unless `on_failure` is `warn`.
        """
        if not self.wanted.every:
            return
        drawn, false = self._beacon.draw()
        named = {rank: ["its random number is not the one it committed to"] for rank in false}
        if drawn % self.wanted.every and not named:
            return
        began = time.perf_counter()
        seed, order = drawn >> 2, _dealt(drawn, self.replica.ranks)
        place = order.index(self.replica.rank)
        own = self.witness.row(loss, labels, self.replica.sent_gradients(), seed)
        others = [self.witness.redo(step, order[place - back], seed, scale=scale) for back in (1, 2)]
        said = self._digests(seed, [own, *others])
        digests, rows = said[:, :2], said[:, 2:].view(-1, 3, ROW)
        trios = [_trio(order, at, rows) for at in range(len(order))]
        undecided = self._judge_state(digests, step, named)
        undecided += self._judge_work(trios, step, scale, named)
        undecided += self._judge_sum(rows[:, 0], seed)
        self.sink(
            records.Verification(
                step=step + 1,
                distance=max(d for trio in trios for d in trio.distances),
                tolerance=self.tolerance,
                named=tuple(sorted(named)),
                seconds=time.perf_counter() - began,
            )
        )
        self._end(step, named, undecided)

    def same_everywhere(self, step: int) -> None:
        """Verify that all ranks hold the same state before it is saved, after `step` steps.

        Raises Untrustworthy, unless `on_failure` is `warn`.
        """
        if not self.wanted.every:
            return
        drawn, false = self._beacon.draw()
        named = {rank: ["its random number is not the one it committed to"] for rank in false}
        undecided = self._judge_state(self._digests(drawn >> 2, []), step, named)
        self._end(step - 1, named, undecided)

    def _digests(self, seed: int, rows: Sequence[Tensor]) -> Tensor:
        """Return the row of every rank: a digest as two numbers, then `rows`."""
        mine = digest(self._held(), seed)
        row = torch.cat([torch.tensor([mine >> 32, mine % 2**32], dtype=torch.float64), *rows])
        return self.replica.gather(tuple(row.tolist()))

    def _held(self) -> list[Tensor]:
        """Return the tensors that are equal on all ranks. Sharded states would be seen by one rank only."""
        kept = [tensor for _, _, _, tensor in self.states.slots()]
        return [*(p.detach() for p in self.witness.engine.module.parameters()), *kept]

    def _judge_state(self, digests: Tensor, step: int, named: dict[int, list[str]]) -> list[str]:
        odd = outvoted([tuple(row) for row in digests.tolist()])
        if odd is None:
            return ["the parameters differ between ranks, and no majority holds the same ones"]
        since = f"equal after step {self._sound}" if self._sound >= 0 else "never found equal"
        for rank in odd:
            said = f"its parameters or optimizer states differ from those of most ranks ({since})"
            named.setdefault(rank, []).append(said)
        if not odd:
            self._sound = step
        return []

    def _judge_work(
        self, trios: Sequence[ThreeWayVote], step: int, scale: float, named: dict[int, list[str]]
    ) -> list[str]:
        disputed = [trio for trio in trios if trio.word(self.tolerance) is not Majority.NOBODY]
        if not disputed:
            return []
        noise = self._noise(step, disputed[0].ranks[0], scale)
        tolerance = max(self.tolerance, self.wanted.tolerance_factor * noise)
        undecided = []
        for trio in disputed:
            if trio.word(tolerance) is Majority.UNDECIDED:
                whose = f"rank {trio.ranks[0]}'s samples"
                undecided.append(f"ranks {list(trio.ranks)} compute three different gradients of {whose}")
            if (odd := trio.odd(tolerance)) is not None:
                rank, far = odd
                whose = "its own" if rank == trio.ranks[0] else f"rank {trio.ranks[0]}'s"
                others = " and ".join(str(r) for r in trio.ranks if r != rank)
                said = f"its gradient of {whose} samples differs by {far:.2g} of its norm from that of ranks {others}"
                named.setdefault(rank, []).append(f"{said} (noise: up to {tolerance:.2g})")
        return undecided

    def _judge_sum(self, rows: Tensor, seed: int) -> list[str]:
        """Compare the mean gradient with the sum of the gradients that all ranks report to have sent."""
        if not self.replica.is_exact:
            return []
        shares = self.replica.shares()[:, None]
        came = self.witness.row(0.0, 0.0, self.replica.gradients(), seed)[3:]
        size = (shares[:, 0] * rows[:, 2]).sum()
        apart = float((came - (shares * rows[:, 3:]).sum(0)).norm() / size) if size > 0 else 0.0
        coarse = max(torch.finfo(p.dtype).eps for p in self.witness.params.values())  # rounding error of the mean
        if apart <= 4 * self.replica.ranks * coarse:
            return []
        said = f"the mean gradient differs by {apart:.2g} of its norm from the sum of the gradients that ranks report"
        return [f"{said}: some rank sent another gradient than it reports"]

    def _noise(self, step: int, replica: int, scale: float) -> float:
        """Return the distance between re-executions on one rank, the median over ranks."""
        reruns = self._reruns(step, replica=replica, seed=1, scale=scale)
        return _middle([max(distance(row, rows[0]) for row in rows) for rows in reruns])

    def _reruns(self, step: int, *, replica: int, seed: int, scale: float = 1.0) -> Tensor:
        """Return (ranks, reruns, ROW): all ranks redo the same work, each time with another number of threads."""
        rows = [self.witness.redo(step, replica, seed, scale=scale, threads=n) for n in _RERUNS]
        return self.replica.gather(tuple(torch.cat(rows).tolist())).view(-1, len(_RERUNS), ROW)

    @property
    def _floor(self) -> float:
        """Return the distance that counts as noise even if none was measured."""
        return _EPS * torch.finfo(torch.float32).eps

    def _end(self, step: int, named: dict[int, list[str]], undecided: Sequence[str]) -> None:
        found = [f"rank {r} on host {self._hosts[r]}: {'; '.join(named[r])}" for r in sorted(named)]
        if not named and not undecided:
            return
        said = ". ".join(found or [f"no rank can be named: {'; '.join(undecided)}"])
        if self.wanted.on_failure == "warn":
            self._tell("error", step, said, rank=min(named, default=-1))
            return
        raise Untrustworthy(
            f"step {step + 1}: {said}. No checkpoint was saved since: resume from the last one, without that machine"
        )

    def _tell(self, level: str, step: int, message: str, *, rank: int = -1) -> None:
        self.sink(records.Event(level=level, message=message, step=step + 1, rank=rank))


def _middle(noise: Sequence[float]) -> float:
    """Return the median; 0 if it is not finite, as with half precision out of range: it then does not measure noise."""
    found = sorted(noise)[len(noise) // 2]
    return found if math.isfinite(found) else 0.0


def _dealt(drawn: int, ranks: int) -> list[int]:
    """Return the ranks in a random order; each redoes the work of the two before it."""
    return torch.randperm(ranks, generator=torch.Generator().manual_seed(drawn >> 1)).tolist()


def _trio(order: Sequence[int], at: int, rows: Tensor) -> ThreeWayVote:
    """Return the vote on one rank's gradient: its own row, and those of the two ranks after it in the order."""
    first, second = order[(at + 1) % len(order)], order[(at + 2) % len(order)]
    return ThreeWayVote((order[at], first, second), (rows[order[at], 0], rows[first, 1], rows[second, 2]))
