"""Shared parts of the trackers: import their package, and flatten records and configurations."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from typing import Any

from gossamer.spec.errors import bad_input
from gossamer.spec.extras import install
from gossamer.spec.records import Evaluation, Record, Step
from gossamer.spec.validation_sets import HELD_OUT
from gossamer.view.fraction import part_of


def need(module: str, *, extra: str) -> Any:
    """Import `module`; raises BadInput that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise bad_input(
            wanted=f"the package {module.partition('.')[0]} for the tracker {extra}",
            got=str(error),
            do=f"{install(extra)}, or take {extra} out of run.trackers",
            key="run.trackers",
        ) from None


def hush(*variables: tuple[str, str]) -> None:
    """Turn off a package's telemetry by environment variables, unless the user has set them. Call before the import."""
    for name, value in variables:
        os.environ.setdefault(name, value)


def scalars(record: Record) -> tuple[int, dict[str, float]]:
    """Return (step, figures by name): empty for records without figures. Non-finite figures are left out."""
    if isinstance(record, Step):
        values = {
            "train/learning_rate": record.lr,
            "train/gradient_norm": record.grad_norm,
            "train/rejected": float(not record.committed),
            "speed/tokens_per_s": record.tokens / record.step_s if record.step_s > 0 else math.nan,
            "speed/step_s": record.step_s,
            "speed/exposed_share": math.nan if (share := part_of(record.exposed_s, record.step_s)) is None else share,
            "speed/sent_bytes": float(sum(record.wire_bytes.values())),
            "memory/peak_bytes": float(record.peak_bytes),
            "train/loss": record.loss if record.committed else math.nan,
        }
        return record.step, _finite(values)
    if isinstance(record, Evaluation):
        bits = record.bits_per_byte if record.bits_per_byte is not None else math.nan
        group = "validation" if record.name == HELD_OUT else f"validation/{record.name}"
        values = {"loss": record.loss, "bits_per_byte": bits, **record.metrics}
        return record.step, _finite({f"{group}/{name}": value for name, value in values.items()})
    return 0, {}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a nested configuration: {"train": {"steps": 5}} -> {"train.steps": "5"}."""
    out: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = str(value)
    return out


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
