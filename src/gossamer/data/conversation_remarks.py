"""What happened to the conversations of a corpus on their way into sequences, told to the user with counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gossamer.data.manifest import SIDES, SplitSide
from gossamer.data.pair_sequences import fitting_pairs
from gossamer.data.stream import Stream
from gossamer.data.whole_documents import learnt_within


def remarks_on(known: Mapping[str, Any], streams: Mapping[SplitSide, Stream], sequence: int) -> Iterator[str]:
    """Yield what was cut, left out, or is learnt otherwise than it will be asked for. `known`: the corpus's manifest.

    `sequence`: tokens in a sequence. Both sides count together.
    """
    sizes = [stream.ends() - stream.starts for stream in streams.values()]
    total = sum(one.size for one in sizes)
    if cut := sum(int((one > sequence).sum()) for one in sizes):
        longest = max(int(one.max()) for one in sizes if one.size)
        yield (
            f"{cut} of {total} conversations {_are(cut)} longer than data.sequence, {sequence} tokens, and {_are(cut)} "
            f"cut there (the longest has {longest})"
        )
    if lost := total - sum(learnt_within(stream, sequence)[0].size for stream in streams.values()):
        yield f"{lost} of these {_have(lost)} no answer within {sequence} tokens and {_are(lost)} left out"
    yield from _shared(known)


def remarks_on_pairs(known: Mapping[str, Any], streams: Mapping[SplitSide, Stream], sequence: int) -> Iterator[str]:
    """Yield what was left out of preference pairs, and what is learnt otherwise than it will be asked for."""
    total = sum(stream.starts.size // 2 for stream in streams.values())
    if lost := total - sum(fitting_pairs(stream, sequence).size // 2 for stream in streams.values()):
        yield (
            f"{lost} of {total} pairs {_are(lost)} left out: an answer of {'it' if lost == 1 else 'them'} ends behind "
            f"data.sequence, {sequence} tokens"
        )
    yield from _shared(known)


def _shared(known: Mapping[str, Any]) -> Iterator[str]:
    if shared := sum(known[side]["shared"] for side in SIDES):
        yield (
            f"{shared} {'answer begins' if shared == 1 else 'answers begin'} within a token that also ends the prompt: "
            "a prompt alone gives other tokens there, so that the template does not suit the tokenizer"
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"
