"""Majority comparison: find the ranks whose value differs from that of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def outvoted(said: Sequence[Hashable]) -> list[int] | None:
    """Return the ranks whose value differs from that of the majority; None where no value has more than half of the
    ranks.
    """
    word, count = Counter(said).most_common(1)[0]
    return [rank for rank, one in enumerate(said) if one != word] if 2 * count > len(said) else None


def parted(said: Sequence[Hashable], whose: Sequence[int] = ()) -> str:
    """Return a clause that names the ranks that differ from the majority, or all groups of ranks without a majority.

    `whose`: the ranks that have said it, 0 and on where none are given.
    """
    whose = whose or range(len(said))
    odd = [whose[place] for place in outvoted(said) or ()]
    if odd:
        verb = "differs" if len(odd) == 1 else "differ"
        return f"{ranked(odd)} {verb} from the other {len(said) - len(odd)}"
    groups: dict[Hashable, list[int]] = {}
    for rank, word in zip(whose, said, strict=True):
        groups.setdefault(word, []).append(rank)
    *most, last = (ranked(ranks) for ranks in groups.values())
    return f"{', '.join(most)} and {last} differ" + (", and none of them is a majority" if len(said) > 2 else "")


def ranked(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0, 2" (the ranks in the order given)."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
