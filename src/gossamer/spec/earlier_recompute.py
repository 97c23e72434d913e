"""The earlier spelling of recompute, a pipeline schedule around others: now it is a saver, beside any schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAME, _INSIDE = "recompute", "one_f_one_b"  # and the schedule inside, where none was written
_UNSET: tuple[Any, ...] = (None, "auto", "none", ["auto"], ["none"], [], ())


def as_saver(values: Any) -> Any:
    """Return the fields of a plan, or of its section in a configuration, with recompute among `savers`.

    Whatever is no mapping, or does not name it as a schedule, is returned as it is.
    """
    if not isinstance(values, Mapping) or "pipeline_schedule" not in values:
        return values
    schedule, is_found = _without(values["pipeline_schedule"])
    if not is_found:
        return values
    savers = values.get("savers")
    named = () if savers in _UNSET else tuple(savers) if isinstance(savers, (list, tuple)) else (savers,)
    has = any(one == _NAME or (isinstance(one, Mapping) and _NAME in one) for one in named)
    return {**values, "pipeline_schedule": schedule, "savers": list(named if has else (_NAME, *named))}


def _without(written: Any) -> tuple[Any, bool]:
    """Return a schedule without the recompute around or within it, and whether there was one."""
    if written == _NAME:
        return _INSIDE, True
    if not isinstance(written, Mapping) or len(written) != 1:
        return written, False
    [(name, inside)] = written.items()
    if name == _NAME:
        inner = inside.get("inner", inside) if isinstance(inside, Mapping) else inside
        return _without(inner or _INSIDE)[0], True
    if not isinstance(inside, Mapping) or "inner" not in inside:
        return written, False
    inner, is_found = _without(inside["inner"])
    return ({name: {**inside, "inner": inner}}, True) if is_found else (written, False)
