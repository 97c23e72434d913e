"""Construction of a part of a model: the user's own constructor runs, and unwanted parameters never hold memory.

A parameter is replaced by a fake tensor when it is registered; its initialization afterwards costs nothing. At most one
unwanted parameter exists at a time. Random numbers do not depend on what is wanted: each random operation of the
constructor is keyed by its parameter (see `seeded.py`), and the same ones run on a fake tensor. The meta device
does not guarantee this: some initializers check for it and then draw nothing.

The name of each parameter is known only when the constructor is over, so there are two passes: `MetaModel.of` without
any parameter, and `MetaModel.build` with those of one stage. Both are traced (`constructor_trace.py`): if a parameter
value is used for anything but the parameter itself, the constructor is not simple, and has to run with real tensors.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from gossamer.model.snapshot import Snapshot
from gossamer.model.split.constructor_trace import ConstructorFinding, ConstructorTrace, NotSimple
from gossamer.model.split.dataflow import hollow

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class MetaModel:
    """A model without its parameters' storage, and the order in which its constructor makes them."""

    module: nn.Module  # can run: its parameters are zeros without memory
    order: dict[str, int]  # canonical name -> number of the registration
    tape: int  # hash of the constructor's operators
    is_loaded: bool = False  # all parameter values are loaded afterwards

    @staticmethod
    def of(build: Build, *, is_loaded: bool = False) -> MetaModel:
        """Run `build` once, and trace it. Raises NotSimple.

        It must do the same every time, as `ModelSource.build` does for one seed.
        """
        return _run(build, ConstructorTrace(frozenset(), is_loaded=is_loaded))

    def build(self, build: Build, holds: frozenset[str]) -> nn.Module:
        """Run `build` again, with memory for the parameters named in `holds` alone; the others are zeros without it.

        Raises NotSimple, also if the constructor does something else than before.
        """
        wanted = frozenset(self.order[name] for name in holds if name in self.order)
        again = _run(build, ConstructorTrace(wanted, is_loaded=self.is_loaded))
        if (again.order, again.tape) != (self.order, self.tape):
            raise NotSimple(ConstructorFinding("the constructor runs other operators every time"))
        return again.module


def without_storage(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters are zeros without memory.

    Tensors of an autograd graph are copied without the graph. Objects that cannot be copied (locks, files) are shared.
    """
    blanks: dict[int, object] = {}
    for parameter in module.parameters():
        zeros = hollow(tuple(parameter.shape), parameter.dtype, torch.device("cpu"), fill=0.0)
        blank = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
        vars(blank).update(vars(parameter))
        blanks[id(parameter)] = blank
    found = Snapshot.of(module)
    blanks.update((id(single), single) for single in found.uncopied())
    for tensor in found.tensors:
        if not tensor.is_leaf:  # deepcopy refuses these
            blanks[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy.deepcopy(module, blanks)  # type: ignore[arg-type]


def hollow_out(module: nn.Module, holds: frozenset[str]) -> None:
    """Free the memory of all parameters that are not named in `holds`; they stay the same objects, as zeros."""
    for name, parameter in module.named_parameters():
        if name not in holds:
            parameter.data = hollow(tuple(parameter.shape), parameter.dtype, parameter.device, fill=0.0)


@contextmanager
def registered() -> Iterator[Callable[[nn.Module], list[str]]]:
    """Yield a function that returns the parameter names, in registration order, of a module built in this context."""
    order: dict[int, weakref.ref[nn.Parameter]] = {}
    places: list[tuple[weakref.ref[nn.Parameter], str]] = []

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        known = order.get(id(parameter))
        if parameter is not None and (known is None or known() is not parameter):
            order[id(parameter)] = weakref.ref(parameter)
            places.append((order[id(parameter)], f"{name} of a {type(module).__name__}"))

    def names(module: nn.Module) -> list[str]:
        of = {id(p): name for name, p in module.named_parameters()}
        return [of.get(id(alive()), place) if alive() is not None else place for alive, place in places]

    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        yield names
    finally:
        handle.remove()


def _run(build: Build, constructor: ConstructorTrace) -> MetaModel:
    with _older_objects_apart():
        try:
            with constructor.watching():
                module = build()
        except Exception as error:
            cause = error.__cause__ or error
            said = f"the constructor fails without the values of parameters ({type(cause).__name__}: {cause})"
            finding = constructor.finding or ConstructorFinding(said.replace("{", "(").replace("}", ")"))
            raise NotSimple(finding) from error
        order, tape = constructor.order(module), constructor.tape
        constructor.check(module)
        _fill(module)
        constructor.check_left(module)
        return MetaModel(module, order, tape, constructor.is_loaded)


@contextmanager
def _older_objects_apart() -> Iterator[None]:
    """Keep what is there already from the garbage collector: what is left of a trace is looked for among all objects.

    A process with torch and transformers has half a million. Where somebody has frozen objects, these stay frozen.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _fill(module: nn.Module) -> None:
    """Put zeros in place of fake parameters; tied ones stay tied, and keep their attributes."""
    blanks: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id: a fake parameter (held), its replacement
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if isinstance(parameter, FakeTensor):
                _, blank = blanks.setdefault(id(parameter), (parameter, _blank(parameter)))
                setattr(owner, name, blank)


def _blank(fake: nn.Parameter) -> nn.Parameter:
    zeros = hollow(tuple(fake.shape), fake.dtype, fake.device, fill=0.0)
    blank = nn.Parameter(zeros, requires_grad=fake.requires_grad)
    of_fakes = vars(nn.Parameter(fake.detach()))
    vars(blank).update({name: held for name, held in vars(fake).items() if name not in of_fakes})
    return blank
