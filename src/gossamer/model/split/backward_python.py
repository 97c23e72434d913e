"""Python code of the model that runs in a backward pass (hooks, autograd Functions, recomputed regions), and its state.

In one process every backward comes right after its forward. With pipeline stages other forwards run in between. So the
backward of a micro-batch runs on the Python state that the forward of that micro-batch left. A change that such code
makes is kept if only the code of its own unit uses it; otherwise BadInput names it. Models without such code pay
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import module as torchs
from torch.utils import checkpoint

from gossamer.model.python_state.record import Difference
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.recompute import BufferValues, copy_buffers, in_place_of, python_of
from gossamer.model.split.split_error import split_error
from gossamer.model.split.split_points import StageSpec
from gossamer.model.split.stale_attributes import StaleAttributes
from gossamer.spec.errors import BadInput, bad_input

_SETS = frozenset(
    (
        "register_hook", "register_prehook", "register_post_accumulate_grad_hook", "register_multi_grad_hook",
        "register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook",
        "saved_tensors_hooks", "checkpoint", "checkpoint_sequential", "custom_op", "register_autograd",
    )
)  # fmt: skip
_RECOMPUTES = (checkpoint.checkpoint, checkpoint.checkpoint_sequential)
BackwardWrapper = Callable[[bool], AbstractContextManager[None]]  # is the backward split? -> the context it runs in


def runs_in_backward(module: nn.Module) -> bool:
    """Return whether user code may run in a backward of `module`: a hook is set, or the code names what sets one."""
    if torchs._global_backward_hooks or torchs._global_backward_pre_hooks:
        return True
    if any(inner._backward_hooks or inner._backward_pre_hooks for inner in module.modules()):
        return True
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(x, name, None) for x in module.parameters() for name in hooks):
        return True
    found = Snapshot.of_python(module, "")
    if _SETS & found.names() or any(one is held for held in found.found() for one in _RECOMPUTES):
        return True
    return any(isinstance(x, type) and issubclass(x, Function) and found.is_own(x) for x in found.found())


@dataclass
class BackwardPython:
    """The Python state that backward passes of one stage read and change. `owned`: paths of the stage's units."""

    module: nn.Module
    stage: int
    owned: frozenset[str]
    holds: frozenset[str]  # buffers that the stage holds, by path
    stale: StaleAttributes
    carried: dict[tuple[int, str], Any] = field(default_factory=dict)  # (module, attribute) -> value set by a backward

    def leave(self, flow: DataFlow) -> BackwardWrapper:
        """Capture the Python state after a forward; return the factory of the context in which its backward runs."""
        changed = {name for name, use in flow.buffers.items() if use.changes} & self.holds
        left = python_of(self.module)
        versions = {id(x): (x, x._version) for x in left.tensors if not isinstance(x, AbsentTensor)}
        return partial(self._around, flow, left, copy_buffers(self.module, changed), versions)

    @contextmanager
    def _around(
        self,
        flow: DataFlow,
        left: Snapshot,
        buffers: BufferValues,
        versions: Mapping[int, tuple[Tensor, int]],
        is_split: bool,
    ) -> Iterator[None]:
        self._check_written(left, versions)
        now = python_of(self.module)
        left.put_back()
        self._carry()
        found: list[Difference] = []
        try:
            with in_place_of(buffers), self.stale.looking(), self._reading(flow):
                begun = python_of(self.module)
                had = self._numbers(begun)
                yield
                found = [*begun.differences()]
                self._check_numbers(flow, begun, had, is_split)
        finally:
            now.put_back()
        for one in found:
            self._keep(flow, one, is_split)
        self._carry()

    def _carry(self) -> None:
        for module in self.module.modules() if self.carried else ():
            for (owner, name), held in self.carried.items():
                if owner == id(module):
                    object.__setattr__(module, name, held)

    def _keep(self, flow: DataFlow, one: Difference, is_split: bool) -> None:
        root = one.root
        path = next((p for p, m in self.module.named_modules() if root is not None and id(m) == root[0]), None)
        is_own = path is not None and any(path == unit or path.startswith(f"{unit}.") for unit in self.owned)
        if root is None or not is_own or is_split or one.name != f"{path}.{root[1]}" or one.name in flow.state.touched:
            raise self._refused(one.name)
        self.carried[root] = one.now

    def _numbers(self, begun: Snapshot) -> dict[int, tuple[str, Tensor, int]]:
        named = [(path, x) for path, x in self.module.named_buffers() if path in self.holds]
        named += [(begun.name_of(x), x) for x in begun.tensors]
        return {id(x): (name, x, x._version) for name, x in named if not isinstance(x, AbsentTensor)}

    def _check_numbers(
        self, flow: DataFlow, begun: Snapshot, had: Mapping[int, tuple[str, Tensor, int]], is_split: bool
    ) -> None:
        own = {id(x) for x in begun.tensors}
        for name, x, version in had.values():
            if x._version != version and (is_split or id(x) in own or name in flow.buffers):
                raise self._refused(name)

    def _check_written(self, left: Snapshot, versions: Mapping[int, tuple[Tensor, int]]) -> None:
        for x, version in versions.values():
            if x._version != version:
                raise bad_input(
                    wanted=f"{left.name_of(x)} unchanged from a forward to its backward on stage {self.stage}, in "
                    "which a hook, an autograd.Function or recomputed code may read it",
                    got="an in-place write by a later forward",
                    do="assign a new tensor instead of writing in place, or use a schedule that runs the backward of a "
                    "micro-batch before the next forward",
                    key="plan.pipeline_schedule",
                )

    def _refused(self, name: str) -> BadInput:
        return split_error(
            wanted="a backward that changes no state, except state that its own unit alone uses",
            got=f"a hook, an autograd.Function or a recomputed forward that changes {name or 'a variable'}, "
            f"on stage {self.stage} (with {', '.join(sorted(self.owned))}), after forwards of other micro-batches",
            do=lambda say: f"change it in the forward, or {say.whole}",
        )

    @contextmanager
    def _reading(self, flow: DataFlow) -> Iterator[None]:
        """Raise BadInput at a read of an attribute that a unit of another stage has set."""
        calls = flow.calls
        foreign = {key for key, at in flow.state.kept.items() if any(calls[i].unit not in self.owned for i in at)}
        paths = {id(m): path for path, m in self.module.named_modules()} if foreign else {}
        roots = {
            (i, key.rpartition(".")[2]) for i, p in paths.items() for key in foreign if key.rpartition(".")[0] == p
        }
        if not roots:
            yield
            return
        outer = vars(nn.Module).get("__getattribute__")

        def read(module: nn.Module, name: str) -> Any:
            if (id(module), name) in roots:
                raise split_error(
                    wanted=f"hooks that run on stage {self.stage} to read what this stage computes",
                    got=f"one that reads {paths[id(module)]}.{name}, which a unit of another stage has set",
                    do=lambda say: f"capture the value in the hook's closure, or let one stage have both ({say.cuts})",
                )
            return object.__getattribute__(module, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            if outer is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = outer  # type: ignore[method-assign]


def check_left(flow: DataFlow, part: StageSpec) -> None:
    """Raise BadInput if a backward may read a tensor that units of several stages store outside all modules.

    For example, as an attribute of a class.
    """
    for name, at in flow.state.left.items():
        if any(part.owns(i) for i in at) and not all(part.owns(i) for i in at):
            raise split_error(
                wanted=f"{name}, which code in a backward may read, to be set by units of one stage",
                got=f"writes by {', '.join(flow.calls[i].name for i in sorted(at))}",
                do=lambda say: (
                    f"keep it in the ctx of the autograd.Function, or set {say.cuts} so that one stage has all "
                    "these units"
                ),
            )
