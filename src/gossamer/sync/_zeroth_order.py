"""Zeroth-order (forward-only) training on one rank: perturbed losses, one byte per direction, the same update on all
ranks.

A rank perturbs its parameters along a direction and against it, and sends the directional derivative to the others in
one byte. All ranks generate all directions again from their keys and apply the same sums. Equal parameters stay equal,
bit for bit, as no sum depends on the rank that computes it. No parameter changes before `take`.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import key_at
from gossamer.ops.random_signs import signed_sums
from gossamer.spec.errors import WireMismatch
from gossamer.spec.odd_one_out import outvoted, parted
from gossamer.sync._float8 import decode, encode
from gossamer.sync._gradient_reducer import GradientReducer
from gossamer.sync._step_messages import ParameterChecksum, StepMessage
from gossamer.sync._step_vote import StepVote
from gossamer.sync._zeroth_order_config import ZerothOrderConfig


@dataclass(slots=True)
class ZerothOrderRank:
    """The zeroth-order steps of one rank: evaluates losses at +-epsilon along random directions, applies updates.

    `params`: the trained parameters by name; `truth`: by the same names the float32 master weights, which are updated
    in place of parameters in half types. `replica`: the gradient reducer, which must have begun the step before `look`.
    """

    probe: ZerothOrderConfig
    params: Mapping[str, Tensor]
    truth: Mapping[str, Tensor]
    replica: GradientReducer
    seed: int

    @torch.no_grad()
    def look(self, step: int, loss: Callable[[], float]) -> StepVote:
        """Measure the directional derivatives along this rank's directions of a step, and return its vote.

        `loss`: returns the mean loss over this rank's rows at the current parameters; 0 where it has none. The vote
        holds the derivatives' codes, the mean of the losses, and the mean square of the decoded derivatives times the
        rank's share: its expectation is the rank's part of the gradient's squared norm.
        """
        count, losses, mine = self.probe.directions, [], []
        first = count * self.replica.rank
        with self._put_back() as kept:
            for number in range(first, first + count):
                ahead, behind = (self._shifted(step, number, way, kept, loss) for way in (1, -1))
                slope = (ahead - behind) / (2 * self.probe.epsilon)
                losses += [ahead, behind] if math.isfinite(slope) else [math.nan]
                mine.append(encode(slope, key_at((self.seed, step, "byte"), number).own / 2**63))
        share = float(self.replica.shares()[self.replica.rank])
        squared = share / count * sum(decode(code) ** 2 for code in mine)
        return StepVote(sum(losses) / len(losses), squared=squared, beside=torch.tensor(mine, dtype=torch.uint8))

    def take(self, heard: StepMessage) -> None:
        """Apply the update of a step, from the codes of all ranks."""
        each, total = len(heard.codes) // len(heard.labels), math.fsum(heard.labels)
        by: list[float] = []
        for number, code in enumerate(heard.codes):
            slope, share = decode(code), heard.labels[number // each] / total if total else 1 / len(heard.labels)
            if heard.clip:
                slope = max(-heard.clip, min(heard.clip, slope))
            by.append(-heard.rate * share / each * slope)
        self.go(heard.step, by)

    @torch.no_grad()
    def go(self, step: int, by: Sequence[float]) -> None:
        """Add by[k] times direction k of a step to the parameters, one direction after the other."""
        moving = [(number, c) for number, c in enumerate(by) if c]
        for name, value in self.truth.items() if moving else ():
            terms = [(self._key(step, name, number), c) for number, c in moving]
            flat = value.reshape(-1)
            for where, moved in signed_sums(flat.numel(), terms, flat.device):
                flat[where] += moved
            _set(value, flat)
            _set(self.params[name], value)  # one in a half type follows

    def checksum(self, step: int, *, begins: bool = False) -> ParameterChecksum:
        """Return a checksum of the parameters after `step` steps."""
        kinds = repr([(n, tuple(p.shape), str(p.dtype)) for n, p in self.params.items()])
        checksum = 0
        for value in self.truth.values():
            there = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(there.numpy().data, checksum)
        digest = hashlib.blake2b(kinds.encode(), digest_size=8).hexdigest()
        return ParameterChecksum(step=step, parameters=digest, checksum=checksum, begins=begins)

    def agreed(self, mark: ParameterChecksum) -> ParameterChecksum:
        """Return `mark` once all ranks have called this and their checksums are equal; raise WireMismatch otherwise."""
        sums = self.replica.gather((float(mark.checksum),))[:, 0].tolist()
        if outvoted(sums) != []:
            raise WireMismatch(f"after step {mark.step} the parameters are not the same on all ranks: {parted(sums)}")
        return mark

    @contextmanager
    def _put_back(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield copies of the parameters, and restore the parameters afterwards."""
        alike = {n for n, p in self.params.items() if p.data_ptr() == self.truth[n].data_ptr()}
        kept = {n: value.clone() if n in alike else value for n, value in self.truth.items()}
        try:
            yield kept
        finally:
            for name, value in kept.items():
                self.params[name].copy_(value)

    def _shifted(
        self, step: int, number: int, way: int, kept: Mapping[str, Tensor], loss: Callable[[], float]
    ) -> float:
        """Return the loss at the parameters shifted along a direction, to the side `way` (1 or -1)."""
        for name, value in kept.items():
            param, flat = self.params[name], value.reshape(-1)
            there = param.reshape(-1)
            term = (self._key(step, name, number), way * self.probe.epsilon)
            for where, moved in signed_sums(flat.numel(), [term], flat.device):
                there[where] = flat[where] + moved
            _set(param, there)
        return loss()

    def _key(self, step: int, name: str, number: int) -> int:
        return key_at((self.seed, step, name, "direction"), number).own


def _set(there: Tensor, value: Tensor) -> None:
    """Copy a value, unless both are the same memory."""
    if there.data_ptr() != value.data_ptr():
        there.copy_(value.view_as(there))
