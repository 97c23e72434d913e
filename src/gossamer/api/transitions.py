"""From one phase to the next: who writes the start folder of a phase, and what is checked of that before any step.

`by` names a method of one of these categories; nothing: the weights go on as they are. One more category is one more
entry of `TRANSITIONS`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """A start folder to write. source: the run before; target: the configuration of the phase; out: a new folder."""

    by: Written | None
    source: Path
    target: RunConfig
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A category of methods that make a start folder. keeps_shapes: the parameters before and after are alike."""

    keeps_shapes: bool
    write: Callable[[StartRequest], Mapping[str, Any]]


def _continued(asked: StartRequest) -> Mapping[str, Any]:
    from gossamer.job.continued_model import write_continued

    return write_continued(asked.source, asked.out)


CONTINUED = Transition(keeps_shapes=True, write=_continued)
TRANSITIONS: Mapping[str, Transition] = {}  # by category


def transition_of(by: Written | None, *, key: str = "") -> Transition:
    """Return who makes the start folder of a phase; the method is built once to check it. Raises BadInput."""
    if by is None:
        return CONTINUED
    name = MethodConfig.parse(by, key=key).name
    for room, found in TRANSITIONS.items():
        registry = importlib.import_module(f"gossamer.{room}").REGISTRY
        if name in registry.names():
            registry.build(by, key=key)
            return found
    rooms = " or ".join(TRANSITIONS) or "none that is installed"
    raise bad_input(
        wanted=f"a method of these categories: {rooms}",
        got=repr(name),
        do="see `gossamer methods`, or leave `by` out where the weights go on as they are",
        key=key,
    )


def make_start(asked: StartRequest) -> Mapping[str, Any]:
    """Write the start folder of a phase, completely or not at all; return what is said of it."""
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    return transition_of(asked.by).write(asked)
