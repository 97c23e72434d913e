"""From one phase to the next: who writes the start folder of a phase, and what is checked of that before any step.

`by` names a method of one of these categories; nothing: the weights go on as they are. One more category is one more
entry of `TRANSITIONS`.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written

if TYPE_CHECKING:  # brings torch
    from gossamer.job.phase_checks import PhaseLook


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """A start folder to write. source: the run before; target: the configuration of the phase; out: a new folder."""

    by: Written | None
    source: Path
    target: RunConfig
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """How a category of methods makes a start folder. check: of the phase before, this one and the method: BadInput."""

    check: Callable[[PhaseLook, PhaseLook, Written], None]
    write: Callable[[StartRequest], Mapping[str, Any]]


def _same_shapes(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    from gossamer.job.phase_checks import check_shapes

    check_shapes(before, after)


def _can_grow(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    from gossamer.job.phase_checks import check_growth

    check_growth(before, after, by)


def _can_quantize(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    _same_shapes(before, after, by)
    if after.config.model.adapter == "none":
        raise bad_input(
            wanted="an adapter in a phase that begins with a quantized model, whose integers cannot be trained",
            got="model.adapter none",
            do="set model.adapter to lora, or quantize after the run (gossamer quantize)",
            key="model.adapter",
        )


def _continued(asked: StartRequest) -> Mapping[str, Any]:
    from gossamer.job.continued_model import write_continued

    return write_continued(asked.source, asked.out)


def _grown(asked: StartRequest) -> Mapping[str, Any]:
    from gossamer.job.growth import grow_model

    assert asked.by is not None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "target.yaml")
        target.write_text(yaml.safe_dump(asked.target.model_dump(mode="json")), "utf-8")
        return grow_model(asked.source, target, asked.by, out=asked.out)


def _pruned(asked: StartRequest) -> Mapping[str, Any]:
    from gossamer.job.pruned_model import PruneRequest, prune_model

    assert asked.by is not None
    return prune_model(PruneRequest(source=asked.source, by=asked.by, out=asked.out), lambda name, done, total: None)


def _quantized(asked: StartRequest) -> Mapping[str, Any]:
    from gossamer.job.quantization import QuantizeRequest, quantize_model

    assert asked.by is not None
    request = QuantizeRequest(source=asked.source, by=asked.by, out=asked.out)
    return quantize_model(request, lambda name, done, total: None)


CONTINUED = Transition(check=_same_shapes, write=_continued)
TRANSITIONS: Mapping[str, Transition] = {  # by category
    "grow": Transition(check=_can_grow, write=_grown),
    "prune": Transition(check=_same_shapes, write=_pruned),
    "quantize": Transition(check=_can_quantize, write=_quantized),
}


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
    raise bad_input(
        wanted=f"a method of one of these categories: {', '.join(TRANSITIONS)}",
        got=repr(name),
        do="see `gossamer methods`, or leave `by` out where the weights go on as they are",
        key=key,
    )


def make_start(asked: StartRequest) -> Mapping[str, Any]:
    """Write the start folder of a phase, completely or not at all; return what is said of it."""
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    return transition_of(asked.by).write(asked)
