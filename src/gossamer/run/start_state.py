"""The state that a run takes over from its start folder beside weights: optimizer moments, and a remark on masks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.run.goal import Progress
from gossamer.sharding import RowRange, ShardedOptimizer
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.start_folder import MASKS, MOMENTS, StartFolder

_KEPT = "kept"  # the slot of masks
_OF_ANY_RULE = frozenset({"main", "master", "common", _KEPT})  # slots beside those of the optimizer that is configured


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """The start folder of a run, and the names of the methods that take over its state.

    optimizer, adapter: as the configuration writes them; holds_masks: whether the optimizer holds the zeros of masks;
    trained: names of all trained parameters; added_to: of those to which an adapter adds that keeps no zeros;
    trains_beside: what is trained is beside the folder's parameters, an adapter or a side network.
    """

    folder: StartFolder
    optimizer: Written
    adapter: Written
    holds_masks: bool
    trained: Collection[str]
    added_to: Collection[str] = ()
    trains_beside: bool = False

    def take_over(self, states: ShardedOptimizer, progress: Progress) -> Iterator[tuple[str, str]]:
        """Set the optimizer states to the moments of the folder; yield (level, message) for the user.

        The moments of other slots than the optimizer's are dropped, and that is said: they are those of another rule.
        The bias correction of updates counts on from the updates of the moments. Raises BadInput for a moment of
        another shape.
        """
        yield from self._moments(states, progress)
        yield from self._masks(states)

    def _masks(self, states: ShardedOptimizer) -> Iterator[tuple[str, str]]:
        """Give the optimizer that holds them the masks of what it trains; say which zeros nobody keeps."""
        masks = self.folder.kinds(MASKS)
        trained = [name for name in masks if name in self.trained]
        if trained and self.holds_masks:
            for slot, name, rows, tensor in states.slots():
                if slot == _KEPT and name in masks:
                    self._take(slot, name, rows, tensor, MASKS)
            yield "info", f"holds the zeros of the masks of {self.folder.path} in {len(trained)} parameters"
        elif trained:
            yield (
                "warning",
                f"{self.folder.path} has masks of {_some(trained)}, which train.optimizer "
                f"{MethodConfig.parse(self.optimizer).name} does not keep: elements that were pruned to 0 are trained "
                "like all others",
            )
        if added := [name for name in masks if name in self.added_to]:
            yield (
                "warning",
                f"{self.folder.path} has masks of {_some(added)}, which model.adapter "
                f"{MethodConfig.parse(self.adapter).name} does not keep: what it adds fills elements that were pruned "
                "to 0 (mask_lora and scale_lora keep them)",
            )

    def _moments(self, states: ShardedOptimizer, progress: Progress) -> Iterator[tuple[str, str]]:
        slots, stored = self.folder.slots, self.folder.kinds(MOMENTS)
        if not slots:
            return
        if self.trains_beside:
            yield "warning", f"the moments in {self.folder.path} are of parameters that stay frozen: they are dropped"
            return
        mine = set(states.rule.slots) - _OF_ANY_RULE
        rule, its = states.rule.made_by, self.folder.moment_rule
        if slots == mine and its not in ("", rule):
            yield (
                "warning",
                f"the moments in {self.folder.path} are those of {its}, not of train.optimizer {rule}: they are "
                "dropped, and the optimizer starts anew",
            )
            return
        if slots != mine:
            name = MethodConfig.parse(self.optimizer).name
            yield (
                "warning",
                f"the moments in {self.folder.path} ({', '.join(sorted(slots))}) are not those of train.optimizer "
                f"{name} ({', '.join(sorted(mine)) or 'none'}): they are dropped, and the optimizer starts anew",
            )
            return
        taken = set[str]()
        for slot, name, rows, tensor in states.slots():
            if slot in slots and f"{slot}/{name}" in stored:
                self._take(slot, name, rows, tensor)
                taken.add(name)
        progress.updates = self.folder.moment_steps
        yield (
            "info",
            f"begins with the optimizer's {', '.join(sorted(slots))} of {self.folder.path}, after "
            f"{self.folder.moment_steps} updates ({len(taken)} parameters on this rank)",
        )

    @torch.no_grad()
    def _take(self, slot: str, name: str, rows: RowRange, tensor: Tensor, file: str = MOMENTS) -> None:
        found = self.folder.tensor(f"{slot}/{name}" if file == MOMENTS else name, file)
        own = rows.of(found) if found.dim() and tensor.dim() else found
        if own.shape != tensor.shape or own.is_floating_point() != tensor.is_floating_point():
            raise bad_input(
                wanted=f"{slot} of {name} with {tuple(tensor.shape)} for {rows.count} rows from {rows.start} on",
                got=f"{tuple(found.shape)} {found.dtype} in {self.folder.path}",
                do="give the model and the optimizer that the folder was written for",
                key=self.folder.key,
            )
        tensor.copy_(own)


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} parameters ({names[0]}{', ...' if len(names) > 1 else ''})"
