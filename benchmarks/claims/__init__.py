"""What papers claim, measured here. A paper is a module with `studies(*, quick: bool) -> list[Study]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from claims._trials import Trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim and what was found. None: this row has no such figure.

    method, baseline   what is claimed about, and what it is compared with
    claim              what `ratio` is, in words
    ratio, paper_ratio ours and the paper's, in the same unit
    spread             least and most of the ratio over seeds, or over repetitions where `seeds` is 1
    seeds              seeds (or repetitions of a timing) of which `ratio` is the mean or the median, as `details` says
    setting            model, tokens, machine: what ours was measured on
    holds              whether the claim was seen here; None where the setting cannot decide
    ratio_without_source   the ratio of flop without those of the model that was there before, where there was one
    """

    method: str
    claim: str
    baseline: str
    ratio: float | None
    paper_ratio: float | None
    spread: tuple[float, float] | None = None
    seeds: int = 1
    setting: str
    holds: bool | None
    ratio_without_source: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Study:
    """Rows that are measured together. `not_quick`: why --quick leaves them out; empty: it does not.

    `measure` gets the journal, and does every piece of work of more than some seconds by it. Studies of more `worth`
    run first. Protocols that `measure` may follow: equal compute classes (`_languini`); values that are tuned on one
    data set and reported on another (`_frozen`).
    """

    name: str
    measure: Callable[[Trials], list[Row]]
    not_quick: str = ""
    worth: int = 0


def is_reached(ratio: float, paper_ratio: float) -> bool:
    """Return whether a ratio of which more is better is within 5 % of the paper's, or beyond it."""
    return ratio >= 0.95 * paper_ratio
