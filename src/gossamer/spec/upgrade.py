"""Conversion of configurations and plans of earlier versions to the names of this one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gossamer.spec.config import RunConfig
from gossamer.spec.earlier_names import ALL_LEVELS, KEYS, LEVELS, METHODS, PARAMETERS, PLAN_FIELDS, VALUES
from gossamer.spec.method_config import category_of
from gossamer.spec.plan import PLAN_FORMAT


def configuration(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration of an earlier version under the names of this one."""
    now = _section(values, "")
    counts = now.get("plan", {}).pop("train.accumulate", "auto") if isinstance(now.get("plan"), dict) else "auto"
    if counts != "auto":
        train = now.get("train") or {}
        now["train"] = {**train, "accumulate": counts} if train.get("accumulate", "auto") == "auto" else train
    return now


def plan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan of an earlier format as this version writes them."""
    return {**(_renamed(values) if values.get("format") == 1 else values), "format": PLAN_FORMAT}


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan of format 1 under the names of this version."""
    named = {PLAN_FIELDS.get(name, name): value for name, value in values.items()}
    now = {
        name: _methods(value, earlier_methods(key)) if is_method_key(key := f"plan.{name}") else value
        for name, value in named.items()
    }
    if "adapted_from" in now:
        now["adapted_from"] = _methods(now["adapted_from"], METHODS)
    if isinstance(now.get("reasons"), Mapping):
        now["reasons"] = {PLAN_FIELDS.get(name, name): why for name, why in now["reasons"].items()}
    return now


def dotted(key: str) -> str:
    """Return the present name of a dotted key of the configuration, which may lead into a method."""
    around = next((old for old in KEYS if f"{key}.".startswith(f"{old}.")), "")
    key = f"{KEYS[around]}{key[len(around) :]}" if around else key
    parts = key.split(".")
    inside = next((i for i in range(1, len(parts)) if is_method_key(".".join(parts[:i]))), len(parts))
    methods = earlier_methods(".".join(parts[:inside]))
    for i in range(inside, len(parts)):
        parts[i] = PARAMETERS.get(parts[i - 1], {}).get(parts[i], methods.get(parts[i], parts[i]))
    return ".".join(parts)


def earlier_methods(key: str) -> Mapping[str, str]:
    """Return the methods of a dotted key that have other names by now: of the plan alone, without what came later.

    Elsewhere the same words are parameters, such as `plain` of `eva`, or what users name.
    """
    return METHODS if key.startswith("plan.") and key != "plan.savers" else {}


def is_method_key(key: str) -> bool:
    """Return whether a dotted key of the configuration selects methods."""
    section, _, name = key.rpartition(".")
    model: Any = RunConfig.model_fields.get(section)
    field = model.annotation.model_fields.get(name) if model is not None else None
    return field is not None and bool(category_of(field))


def _section(values: Mapping[str, Any], above: str) -> dict[str, Any]:
    now: dict[str, Any] = {}
    for name, value in values.items():
        key = KEYS.get(f"{above}{name}", f"{above}{name}")
        own = key.removeprefix(above)
        if is_method_key(key):
            now[own] = _methods(value, earlier_methods(key))
        elif isinstance(value, Mapping) and key in ("train", "train.verify", "machines", "plan"):
            now[own] = _section(value, f"{key}.")
        elif isinstance(value, str):
            now[own] = VALUES.get(key, {}).get(value, value)
        else:
            now[own] = value
    return now


def _methods(written: Any, methods: Mapping[str, str]) -> Any:
    """Return a method, methods in a list, or lines of [pattern, level, method], as this version writes them.

    methods: those that have other names by now.
    """
    if isinstance(written, (list, tuple)):
        if len(written) == 3 and written[1] in ALL_LEVELS:
            return [written[0], LEVELS.get(written[1], written[1]), _method(written[2], methods)]
        return [_methods(one, methods) for one in written]
    return _method(written, methods)


def _method(written: Any, methods: Mapping[str, str], names: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return a method, or what is below one: `names` are its parameters that have other names by now."""
    if isinstance(written, str):
        return methods.get(written, written)
    if isinstance(written, list):  # of candidates
        return [_method(one, methods) for one in written]
    if not isinstance(written, Mapping):
        return written
    renamed = ((_name_now(name, inside, methods, names), inside) for name, inside in written.items())
    return {name: _method(inside, methods, PARAMETERS.get(name, {})) for name, inside in renamed}


def _name_now(name: str, value: Any, methods: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return the present name of a parameter or method; a number or a switch is a parameter's (whole: true)."""
    return names.get(name, name if isinstance(value, bool | int | float) else methods.get(name, name))
