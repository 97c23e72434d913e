"""From one phase to the next: who writes the start folder of a phase, and what is checked of that before any step.

`by` names a method of one of these categories; nothing: the weights go on as they are. One more category is one more
entry of `TRANSITIONS`.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.view.run_directory import RunDirectory

if TYPE_CHECKING:  # brings torch
    from gossamer.job.phase_checks import PhaseLook


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """A start folder to write. source: the run before; target: the configuration of the phase; out: a new folder;
    progress: is told what is done, how many parts of it, of how many.
    """

    by: Written | None
    source: Path
    target: RunConfig
    out: Path
    progress: Callable[[str, int, int], None] = lambda what, done, total: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """How a category of methods makes a start folder. check: of the phase before, this one and the method: BadInput.

    gives_integers: the phase begins with weights that no further phase can begin with; gives_masks: the folder has
    masks; keeps_masks: it has where the phase before began with some and kept them.
    """

    check: Callable[[PhaseLook, PhaseLook, Written], None]
    write: Callable[[StartRequest], Mapping[str, Any]]
    gives_integers: bool = False
    gives_masks: bool = False
    keeps_masks: bool = False


def _same_shapes(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    from gossamer.job.phase_checks import check_shapes

    check_shapes(before, after)


def _can_grow(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    from gossamer.job.phase_checks import check_growth

    check_growth(before, after, by)


def _can_measure(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    from gossamer.job.phase_checks import check_text

    _same_shapes(before, after, by)
    check_text(before, by)


def _can_prune(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    from gossamer.job.phase_checks import check_pruning

    _can_measure(before, after, by)
    check_pruning(before, by)


def _can_quantize(before: PhaseLook, after: PhaseLook, by: Written) -> None:
    _can_measure(before, after, by)
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
    return prune_model(PruneRequest(source=asked.source, by=asked.by, out=asked.out), asked.progress)


def _quantized(asked: StartRequest) -> Mapping[str, Any]:
    from gossamer.job.quantization import QuantizeRequest, quantize_model

    assert asked.by is not None
    request = QuantizeRequest(source=asked.source, by=asked.by, out=asked.out)
    return quantize_model(request, asked.progress)


CONTINUED = Transition(check=_same_shapes, write=_continued, keeps_masks=True)
TRANSITIONS: Mapping[str, Transition] = {  # by category
    "grow": Transition(check=_can_grow, write=_grown),
    "prune": Transition(check=_can_prune, write=_pruned, gives_masks=True),
    "quantize": Transition(check=_can_quantize, write=_quantized, gives_integers=True),
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
    """Write the start folder of a phase, completely or not at all; return what is said of it.

    There is one already where this was asked before. One that was made of something else, or by another method, is
    made anew: beside it is what was asked.
    """
    beside = asked.out.with_name(f".{asked.out.name}.json")
    wanted = json.dumps(_asked(asked), sort_keys=True)
    if asked.out.is_dir():
        if (beside.read_text("utf-8") if beside.is_file() else "") == wanted:
            return {}
        shutil.rmtree(asked.out)
    try:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(wanted, "utf-8")
    except OSError as error:
        raise bad_input(
            wanted=f"a folder for the start of the phase at {asked.out}",
            got=error.strerror or str(error),
            do="make room for it, or name another run.directory",
            key="run.directory",
        ) from None
    return transition_of(asked.by).write(asked)


def made_by(out: Path) -> Any:
    """Return the method that a start folder was asked for with, as `written_by` writes it; None where it is unknown."""
    beside = out.with_name(f".{out.name}.json")
    return json.loads(beside.read_text("utf-8"))["by"] if beside.is_file() else None


def written_by(by: Written | None) -> Any:
    """Return a method in one form of those that a configuration may write it in; "continue" for none."""
    if by is None:
        return "continue"
    method = MethodConfig.parse(by)
    return {method.name: dict(method.parameters)} if method.parameters else method.name


def _asked(asked: StartRequest) -> dict[str, Any]:
    """Return all that a start folder depends on, JSON-ready."""
    from gossamer.store.checkpoint import list_checkpoints  # brings torch

    source = RunDirectory(asked.source)
    model = asked.target.model.model_dump(mode="json", include={"hf", "gguf", "factory", "config", "dtype"})
    steps = list_checkpoints(source.checkpoints)
    made = {"run": source.path.name, "step": steps[0] if steps else None}
    return {"by": written_by(asked.by), "source": made, "model": model, "seed": asked.target.train.seed}
