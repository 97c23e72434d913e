"""Combinations of a test's parameters, of which a few run by day and all run nightly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def combined(*values: Iterable[Any], by_day: list[tuple[Any, ...]]) -> list[Any]:
    """Return all combinations of `values` as parameters of a test; those that are not of `by_day` run nightly."""
    chosen = itertools.product(*values)
    return [pytest.param(*one, marks=[] if one in by_day else pytest.mark.nightly) for one in chosen]
