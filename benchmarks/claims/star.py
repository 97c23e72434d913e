"""TPI-LLM (Li et al., arXiv 2410.00531): on far links two hops through a hub beat the 2 (n-1) of a ring.

The published figure is what the paper's model of both makes of the setting: a ring takes 2 (n-1) a + 2 (n-1)/n S/B, a
star 2 a + 2 (n-1) S/B, with a one way and S bytes at B per second. gloo's all-reduce, the ring here, waits for its
neighbour's word before every hop, so it takes more than that; and beyond about 14 KB a far TCP stream begins slowly.
"""

from __future__ import annotations

from claims import Row
from claims._exchanges import Timed, Trial, on_lab
from gossamer.compress.star import star_pays
from gossamer.wire.lab import Topology

MBIT = 1e6 / 8
DELAY_S, RATE_MBIT = 0.01, 300
METHODS = {"ring": "dense", "star": {"star": {"hub": "auto"}}, "tree": "tree"}  # host 0, which measures, is no hub


def rows(*, quick: bool) -> list[Row]:
    """Small messages on 4 and 8 hosts, and one on the other side of the crossover."""
    settings = [(4, 4), (8, 4)] if quick else [(hosts, kib) for hosts in (4, 8) for kib in (4, 64, 1024)]
    return [row(hosts, kib, steps=10 if quick else 20) for hosts, kib in settings]


def row(hosts: int, kib: int, *, steps: int) -> Row:
    lab = Topology(hosts, rate_bytes_per_s=RATE_MBIT * MBIT, delay_s=DELAY_S)
    timed = on_lab(lab, Trial(METHODS, {"x": (kib * 256,)}, steps=steps))
    ring, star = predicted(hosts, kib * 1024)
    return Row(
        claim="how many times as fast an exchange is by a star as by a ring",
        published=round(ring / star, 3),
        ours=round(timed["ring"].step_s / timed["star"].step_s, 3),
        setting=f"{kib} KiB, {hosts} hosts, {RATE_MBIT} Mbit/s, {DELAY_S * 1000:g} ms one way",
        details={
            "star_pays": star_pays(kib * 1024, hosts, latency_s=DELAY_S, bytes_per_s=RATE_MBIT * MBIT),
            "predicted_s": {"ring": round(ring, 4), "star": round(star, 4)},
            **{name: figures(one) for name, one in timed.items()},
        },
    )


def predicted(hosts: int, nbytes: int) -> tuple[float, float]:
    """Seconds by ring and by star, as the paper counts them."""
    wire_s = nbytes / (RATE_MBIT * MBIT)
    return 2 * (hosts - 1) * (DELAY_S + wire_s / hosts), 2 * DELAY_S + 2 * (hosts - 1) * wire_s


def figures(one: Timed) -> dict[str, float]:
    return {
        "step_s": round(one.step_s, 4),
        "least_s": round(min(one.steps_s), 4),
        "most_s": round(max(one.steps_s), 4),
        "sent_bytes": round(one.sent_bytes),
    }
