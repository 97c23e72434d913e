"""The update process of a rank with states in tiers: it updates groups in the file while the rank computes.

    rank             backward ... gradient of a group | next group ...    | commit: wait, fdatasync, journal
    update process                                    | read, update, write the record that does not count

Gradients are in shared memory from the first number on (`gradient_memory`): backward writes them there, the process
reads them there and gives the pages back. Messages have their numbers alone. The process runs the threads of
`sharding.TierUpdater` on the same file, so its numbers are theirs, bit for bit, without the lock of the rank's
interpreter. It never writes a record that counts: if it ends at any time, the last step's state is whole.
Memory: an interpreter with torch, and the windows, which the rank's account `host` counts as its own.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer
from gossamer.process.companion_link import CompanionLink
from gossamer.run.gradient_memory import GradientMemory
from gossamer.run.update_messages import TO_RANK, Done, Freed, Keep, LayoutAt, Ready, Setup, Update
from gossamer.sharding import GroupUpdater, TierAccount, TierLayout, UpdateProgress, UpdateTerms
from gossamer.spec.config import RunConfig
from gossamer.store.tier_file import TierFile

_START, _WORK = "its start", "the update of this step"


@dataclass(slots=True)
class UpdateProcess(GroupUpdater):
    """The rank's end of its update process. A thread hears what the process says."""

    layout: TierLayout
    host: TierAccount
    memory: GradientMemory
    link: CompanionLink[Ready | Freed | Done]
    progress: UpdateProgress = field(default_factory=UpdateProgress)
    _is_closed: bool = False
    _hears: threading.Thread | None = None

    @staticmethod
    def of(
        rule: Optimizer, layout: TierLayout, host: TierAccount, file: TierFile, windows: int, config: RunConfig
    ) -> UpdateProcess:
        """Start the process, and return once it is built. Raises BadInput, RunFailed.

        `host`: the account that gradients are given back to.
        """
        memory = GradientMemory.new(layout)
        try:
            link: CompanionLink[Ready | Freed | Done] = CompanionLink.to_new(
                "gossamer.run.update_server",
                TO_RANK,
                descriptors=(file.descriptor, memory.descriptor),
                timeout_s=config.machines.timeout_s,
                name="the update process of this rank",
                longer="the update of one bucket",
                other="set plan.sharding.tiers.update to threads, which updates in the rank itself",
            )
        except BaseException:
            memory.close()
            raise
        found = UpdateProcess(layout, host, memory, link)
        setup = Setup(
            optimizer=json.dumps(config.train.model_dump(mode="json")["optimizer"]),
            rule=repr(rule),
            layout=LayoutAt.of(layout),
            path=str(file.path),
            is_direct=file.is_direct,
            file_descriptor=file.descriptor,
            gradients_descriptor=memory.descriptor,
            windows=windows,
            threads=torch.get_num_threads(),
        )
        try:
            link.send(setup, _START)
            link.wait(_START, lambda: True)
        except BaseException:
            link.close()
            memory.close()
            raise
        found._hears = threading.Thread(target=found._hear, name="gossamer-tier-hears", daemon=True)
        found._hears.start()
        return found

    def gradient(self, index: int) -> Tensor:
        return self.memory.gradient(index)

    def submit(
        self, index: int, record: int, gradient: Tensor | None, idle: frozenset[str], terms: UpdateTerms
    ) -> None:
        names = self.layout.groups[index].names
        update = Update(
            group=index,
            record=record,
            in_memory=gradient is not None,
            idle=[number for number, name in enumerate(names) if name in idle],
            lr_scale=terms.lr_scale,
            step=terms.step,
            scale=terms.scale,
            skipped={name: terms.skipped[name] for name in names if name in terms.skipped},
        )
        self._send(update)

    def keep(self, index: int, gradient: Tensor) -> None:
        self._send(Keep(group=index))

    def _send(self, message: Update | Keep) -> None:
        self.progress.check()
        self.progress.submitted()
        self.link.send(message, _WORK)

    def drop(self, index: int, gradient: Tensor) -> None:
        self.memory.free(index)
        self._freed(index)

    def _freed(self, index: int) -> None:
        self.host.give(self.layout.groups[index].open_bytes)

    def _hear(self) -> None:
        """Count what the process has done, until it or the connection ends."""
        progress = self.progress
        try:
            while True:
                said = self.link.wait(_WORK, lambda: not progress.is_idle)
                if isinstance(said, Freed):
                    self._freed(said.group)
                elif isinstance(said, Done):
                    progress.moved_bytes, progress.busy_s = said.moved_bytes, said.busy_s
                    if said.is_written:
                        progress.written.add(said.group)
                    progress.done()
        except BaseException as error:
            if not self._is_closed:
                progress.failed(error)

    def close(self) -> None:
        """End the process. What it has not written does not count."""
        self._is_closed = True
        self.link.process.kill()
        if self._hears is not None:
            self._hears.join()
        self.link.close()
        self.memory.close()
