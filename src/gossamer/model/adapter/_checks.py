"""Checks of settings that several kinds of adapters have."""

from __future__ import annotations

from gossamer.spec.errors import bad_input


def check_rank(rank: int, dropout: float) -> None:
    """Raise BadInput unless the rank is at least 1 and the dropout is a probability below 1."""
    if rank < 1:
        raise bad_input(wanted="a rank of at least 1", got=str(rank), do="write 8, 16 or 64", key="rank")
    if not 0 <= dropout < 1:
        raise bad_input(wanted="a dropout >= 0 and < 1", got=str(dropout), do="write 0, or 0.05", key="dropout")
