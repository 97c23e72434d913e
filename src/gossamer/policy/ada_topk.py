"""AdaTopK: pipeline links send only the largest entries of a tensor, the fewer the slower the link (FusionLLM).

Equations (link p>q, ratio r):
    T_pq = L_pq + bytes_pq / B_pq                            the uncompressed tensor
    r_pq = overhead r T_pq / max T,   the fraction sent is 1 / r_pq;   dense where r_pq <= overhead
Symbols: L, B measured latency and rate; overhead: bytes of an entry sent (value and place) by those of a dense one, at
most 2: so the slowest link sends 1/r of its bytes, and one whose r_pq is no larger would send no fewer.
Paper:   Tang et al., FusionLLM, arXiv 2410.12707 (there overhead 3: places of 8 bytes).
Good when: few links of a pipeline are slow.   Not for: ratios above about 50: activations do not bear it.
Unlike the paper: dense is not "ratio 1" but every ratio that saves nothing; hence r = 1 is dense everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.policy import AdaptChoices, Policy
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.statistics import Paths, Statistics


@dataclass(frozen=True, slots=True)
class AdaTopK(Policy):
    """A policy that sets the top-k fraction of every pipeline link from its measured bandwidth.

    `ratio`: compression of the slowest link, in bytes. `method`: the activation codec with a `fraction`; `dense`: the
    activation codec of all other links.
    """

    ratio: float = 8.0
    overhead: float = 2.0
    method: str = "topk"
    dense: str = "none"

    for_links = True

    def __post_init__(self) -> None:
        for name, value in (("ratio", self.ratio), ("overhead", self.overhead)):
            if not 1 <= value < float("inf"):
                raise bad_input(wanted=f"{name} >= 1", got=repr(value), do=f"set {name} to 8, for example", key=name)

    def choose(self, statistics: Statistics, paths: Paths) -> AdaptChoices:
        found = ratios(_seconds(statistics.crossing, paths), self.ratio, self.overhead)
        rules = tuple((".*", link, self._written(r)) for link, r in found.items())
        fewer = [link for link, r in found.items() if r > 1]
        worst = max(found.values(), default=1.0) / self.overhead
        said = f"{len(fewer)} of {len(found)} links compressed, the slowest by {worst:.3g}" if fewer else "no link is"
        return AdaptChoices((*rules, (".*", "all", self.dense)), said if fewer else f"{said} compressed")

    def _written(self, ratio: float) -> Written:
        return {self.method: {"fraction": 1 / ratio}} if ratio > 1 else self.dense


def ratios(seconds: Mapping[str, float], ratio: float, overhead: float) -> dict[str, float]:
    """Return by link how many elements the tensor has per element sent; 1 is dense."""
    slowest = max(seconds.values(), default=0.0)
    if not 0 < slowest < float("inf"):
        return dict.fromkeys(seconds, 1.0)
    wanted = {link: overhead * ratio * s / slowest for link, s in seconds.items()}
    return {link: r if r > overhead else 1.0 for link, r in wanted.items()}


def _seconds(crossing: Mapping[str, int], paths: Paths) -> dict[str, float]:
    return {link: paths.between[link].seconds(n) for link, n in crossing.items() if link in paths.between}
