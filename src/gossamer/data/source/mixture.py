"""A weighted mixture of other sources."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.data.source import Document, Part, Source, parse_source
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest


@dataclass(frozen=True)
class Mixture(Source):
    """The source that draws from several `sources`, each with its name, in proportion to their `weights`.

    A weight is the source's part of all tokens that are trained on: {chat: 3, text: 1} gives three tokens of chats for
    one of text, whatever their sizes. A smaller source is repeated more often. `sources` are written as data.source
    itself is.
    """

    sources: dict[str, str | dict[str, Any]] = field(hash=False)
    weights: dict[str, float] = field(hash=False)

    def __post_init__(self) -> None:
        if not self.sources:
            raise bad_input(wanted="sources by name", got="none", do="write {NAME: SOURCE, ...}", key="sources")
        for name in self.weights:
            if name not in self.sources:
                raise BadInput(f"no source is called {name!r}: {nearest(name, self.sources)}", key="weights")
        for name in self.sources:
            weight = self.weights.get(name)
            if weight is None or not (math.isfinite(weight) and weight > 0):
                raise bad_input(
                    wanted=f"a weight above 0 for the source {name!r}",
                    got="none" if weight is None else f"{weight:g}",
                    do="write how many parts of all tokens it gives, or leave the source out",
                    key="weights",
                )
        if nested := [name for name, part in self.parts().items() if isinstance(part.source, Mixture)]:
            raise bad_input(
                wanted="sources that are no mixtures themselves",
                got=f"the mixture {nested[0]!r}",
                do="write its sources here, with their weights",
                key="sources",
            )
        if paired := [name for name, part in self.parts().items() if part.source.paired]:
            raise bad_input(
                wanted="text and chats in a mixture",
                got=f"preference pairs in {paired[0]}",
                do="train on the pairs in a run of their own",
                key=f"sources.{paired[0]}",
            )

    def parts(self) -> dict[str, Part]:
        return {
            name: Part(parse_source(written, key=f"data.source.mixture.sources.{name}"), float(self.weights[name]))
            for name, written in self.sources.items()
        }

    def documents(self) -> Iterator[Document]:
        for name, part in self.parts().items():
            for one in part.source.documents():
                yield replace(one, path=f"{name}/{one.path}")

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        return tuple(one for part in self.parts().values() for one in part.source.stamp())

    def remark(self) -> str:
        return "; ".join(filter(None, (part.source.remark() for part in self.parts().values())))
