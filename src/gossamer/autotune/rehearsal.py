"""Profile a step before training, on a batch whose gradients are finite on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gossamer.comm.channel import Channel, gathered
from gossamer.run.batches import Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.profile_step import StepProfile, profile_step
from gossamer.run.step_runner import ModelRuntime

_REHEARSALS = 3  # batches to try for one with finite gradients


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The batches that were tried for a step profile, and the ranks whose last gradients were not finite.

    With such ranks the compression errors are not known, and no lossy exchange is chosen.
    """

    tried: int = 0
    sick: tuple[int, ...] = ()
    batch: int = 0  # the step whose batch was tried last

    @property
    def remark(self) -> str:
        """Return a note on measurements that the choice lacks, to follow its reason; empty if it lacks none."""
        if not self.sick:
            return ""
        return (
            f"; gradients of {self.tried} batches were not finite on ranks {list(self.sick)}: "
            "the error of lossy exchanges is not known, so only exact ones and bf16 were candidates"
        )


def rehearse(engine: ModelRuntime, feed: Feed, channel: Channel, step: int) -> tuple[StepProfile, Rehearsal]:
    """Profile the first batch from `step` on whose gradients are finite on all ranks; return also what was tried.

    After a few batches the last one is returned. One bad batch is harmless: its step will be rejected and retried.
    """
    params = trainable(engine.module)
    for batch in range(step, step + _REHEARSALS):
        profile = profile_step(engine, feed, params, batch)
        is_finite = all(bool(torch.isfinite(g).all()) for g in profile.gradients.values())
        sound = gathered(channel, [float(is_finite)])[:, 0].tolist()
        sick = tuple(rank for rank, ok in zip(channel.levels.everyone, sound, strict=True) if not ok)
        if not sick:
            break
    return profile, Rehearsal(batch - step + 1, sick, batch)
