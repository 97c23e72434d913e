"""The configuration of a method: its name and its parameters, as plans and configuration files write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from gossamer.spec.errors import bad_input

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Written: TypeAlias = str | dict[str, Any]  # as people write it: "dense" or {"topk": {"fraction": 0.01}}
Exchanges: TypeAlias = Written | list[tuple[str, str, Written]]  # or lines of [parameter pattern, level, method]


@dataclass(frozen=True, slots=True)
class MethodOf:
    """The annotation of a configuration key that takes methods of `category`: Annotated[Written, MethodOf("loss")]."""

    category: str


@dataclass(frozen=True, slots=True)
class MethodConfig:
    """The configuration of a method: `name` is its file stem in its category; `parameters` its dataclass fields."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(written: Written | MethodConfig, *, key: str = "") -> MethodConfig:
        """Parse "name", {"name": {...}} or {"name": null}; raises BadInput for anything else.

        {"name": "inner"} is short for {"name": {"inner": {}}}.
        """
        if isinstance(written, MethodConfig):
            return written
        if isinstance(written, str):
            return MethodConfig(written)
        if isinstance(written, Mapping) and len(written) == 1:
            name, parameters = next(iter(written.items()))
            if parameters is None:
                parameters = {}
            if isinstance(parameters, str):  # {error_feedback: dense}: the inner method, written short
                parameters = {parameters: {}}
            if isinstance(name, str) and isinstance(parameters, Mapping):
                return MethodConfig(name, dict(parameters))
        raise bad_input(
            wanted="a method: a name, or one name with its parameters such as {adamw: {lr: 3e-4}}",
            got=repr(written),
            do="write one of the two forms",
            key=key,
        )

    def written(self) -> Written:
        """Return the shortest form that `parse` reads back."""
        return {self.name: dict(self.parameters)} if self.parameters else self.name


def category_of(field: FieldInfo) -> str:
    """Return the category whose methods a configuration key takes; "" for a key that takes none."""
    return next((one.category for one in field.metadata if isinstance(one, MethodOf)), "")


def told(written: Exchanges) -> str:
    """Return methods as one line of text: error_feedback(topk(fraction=0.01)), or "embed: dense; .* inter: topk"."""
    if not isinstance(written, list):
        return _told(written)
    levels = {"all": ""}
    return "; ".join(f"{pattern}{levels.get(level, f' {level}')}: {_told(each)}" for pattern, level, each in written)


def _told(written: Any) -> str:
    if not isinstance(written, Mapping):
        return str(written)
    parts = (
        f"{k}={v}" if v is not None and not isinstance(v, Mapping) else _told_one(k, v) for k, v in written.items()
    )
    return ", ".join(parts)


def _told_one(name: str, inside: Mapping[str, Any] | None) -> str:
    return f"{name}({_told(inside)})" if inside else name
