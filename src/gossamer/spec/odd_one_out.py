"""Who is odd, of several that should say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def outvoted(said: Sequence[Hashable]) -> list[int] | None:
    """The ranks that say other than more than half of all do; None where no word is said by so many."""
    word, count = Counter(said).most_common(1)[0]
    return [rank for rank, one in enumerate(said) if one != word] if 2 * count > len(said) else None


def parted(said: Sequence[Hashable]) -> str:
    """Who differs from whom, for a message: the odd ones from the majority, or all groups where there is none."""
    odd = outvoted(said)
    if odd:
        verb = "differs" if len(odd) == 1 else "differ"
        return f"{ranked(odd)} {verb} from the other {len(said) - len(odd)}"
    groups: dict[Hashable, list[int]] = {}
    for rank, word in enumerate(said):
        groups.setdefault(word, []).append(rank)
    *most, last = (ranked(ranks) for ranks in groups.values())
    return f"{', '.join(most)} and {last} differ" + (", and none of them is a majority" if len(said) > 2 else "")


def ranked(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
