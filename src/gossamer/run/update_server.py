"""The program of a rank's update process: `python -m gossamer.run.update_server DESCRIPTOR` (see `update_process`).

It ends when the rank closes the connection, or is gone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gossamer import optimizer as optimizers
from gossamer.optimizer import Optimizer
from gossamer.optimizer.master import Master
from gossamer.process.companion_link import Failed, serve_rank
from gossamer.process.json_channel import JsonChannel
from gossamer.run.allocator import give_freed_memory_back
from gossamer.run.gradient_memory import GradientMemory
from gossamer.run.update_messages import TO_PROCESS, Done, Freed, Keep, Ready, Setup, Update
from gossamer.sharding import TierUpdater, UpdateListener, UpdateTerms
from gossamer.spec.errors import BadInput, bad_input
from gossamer.store.tier_file import TierFile


def main() -> int:
    """Serve the rank at the other end of the connection in the first argument; return the exit code."""
    give_freed_memory_back()  # as the rank has it
    return serve_rank(TO_PROCESS, serve)


def serve(channel: JsonChannel[Setup | Update | Keep]) -> None:
    """Update the groups that the rank names, until it is gone."""
    setup = channel.receive()
    if not isinstance(setup, Setup):
        return
    torch.set_num_threads(setup.threads)
    layout = setup.layout.layout
    listener = RankListener(channel, GradientMemory.at(setup.gradients_descriptor, layout))
    file = TierFile(Path(setup.path), layout.size_bytes, setup.is_direct, setup.file_descriptor)
    updater = TierUpdater(rule_of(setup), layout, file, setup.windows, listener)
    listener.updater = updater
    updater.start()
    listener.send(Ready())
    while (told := channel.receive()) is not None:
        if isinstance(told, Keep):
            updater.keep(told.group, listener.memory.own(told.group))
        elif isinstance(told, Update):
            names = layout.groups[told.group].names
            gradient = listener.memory.own(told.group) if told.in_memory else None
            terms = UpdateTerms(told.lr_scale, told.step, told.scale, told.skipped)
            updater.submit(told.group, told.record, gradient, frozenset(names[i] for i in told.idle), terms)
    updater.close()


def rule_of(setup: Setup) -> Optimizer:
    """Return the rank's optimizer. Raises BadInput where it is not the one of the settings, or cannot be built here."""
    try:
        rule = Master(inner=optimizers.build(json.loads(setup.optimizer), key="train.optimizer"))
    except BadInput as error:  # the rank has built it
        raise bad_input(
            wanted="an optimizer that a fresh interpreter can build, for the update process",
            got=str(error),
            do="have its class in a module of a file, or set update to threads",
            key="plan.sharding.tiers.update",
        ) from None
    if repr(rule) != setup.rule:
        raise bad_input(
            wanted=f"{setup.rule} in the update process, as in its rank",
            got=repr(rule),
            do="set update to threads",
            key="plan.sharding.tiers.update",
        )
    return rule


@dataclass(slots=True, eq=False)
class RankListener(UpdateListener):
    """Tells the rank what the threads have done."""

    channel: JsonChannel[Setup | Update | Keep]
    memory: GradientMemory
    updater: TierUpdater | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Ready | Freed | Done | Failed) -> None:
        """Send a message, one thread at a time."""
        with self._turn:
            self.channel.send(message)

    def freed(self, index: int) -> None:
        self.memory.free(index)
        self.send(Freed(group=index))

    def done(self, index: int) -> None:
        assert self.updater is not None
        progress = self.updater.progress
        is_written = index in progress.written
        progress.written.discard(index)
        self.send(Done(group=index, is_written=is_written, moved_bytes=progress.moved_bytes, busy_s=progress.busy_s))

    def failed(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # the rank is gone
            self.send(Failed.of(error))


if __name__ == "__main__":
    sys.exit(main())
