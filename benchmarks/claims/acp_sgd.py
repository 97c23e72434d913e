"""ACP-SGD (Zhang et al., arXiv 2306.08881): 4.06 times as fast as S-SGD and 1.43 times as fast as Power-SGD.

The paper's figures are means over models on 8 to 64 GPUs with 1 to 100 Gbit/s; here one GPT of 10.7M parameters on four
hosts with 100 Mbit/s and 5 ms one way. As for the steps that are needed: tests/claims/test_acp_sgd.py.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from claims import Row, Study, is_reached
from claims._exchanges import Timed, Trial, on_lab
from claims._trials import Trials
from gossamer.netlab import LabTopology

MBIT = 1e6 / 8
WIDTH, LAYERS, VOCABULARY = 384, 6, 257
LAB = LabTopology(4, rate_bytes_per_s=100 * MBIT, delay_s=0.005)
SETTING = "GPT of 10.7M parameters, 4 hosts, 100 Mbit/s, 5 ms one way"
PUBLISHED = {"power": 1.43, "dense": 4.06}
SAID = {"power": "Power-SGD", "dense": "S-SGD"}


def studies(*, quick: bool) -> list[Study]:
    """At rank 4 and 32, communication alone and behind 0.3 s of computing."""
    steps = 4 if quick else 10
    return [
        Study(f"rank_{rank}{'_computing' * (compute_s > 0)}", partial(rows, rank, compute_s, steps), why)
        for compute_s in (0.0, 0.3)
        for rank in (4, 32)
        for why in ["takes a minute" if rank == 32 else ""]
    ]


def rows(rank: int, compute_s: float, steps: int, trials: Trials) -> list[Row]:
    def measure() -> dict[str, dict[str, object]]:
        found = on_lab(LAB, Trial(methods(rank), shapes(), steps=steps, compute_s=compute_s))
        return {name: asdict(one) for name, one in found.items()}

    kept = trials(f"{steps} steps", measure)
    timed = {name: Timed(tuple(one["steps_s"]), one["sent_bytes"]) for name, one in kept.items()}
    return [row(timed, peer, rank, compute_s) for peer in PUBLISHED]


def row(timed: dict[str, Timed], peer: str, rank: int, compute_s: float) -> Row:
    ratio = round(timed[peer].step_s / timed["acp"].step_s, 3)
    return Row(
        method="acp_sgd",
        claim=f"how many times as fast a step is with ACP-SGD as with {SAID[peer]}",
        baseline={"power": "powersgd", "dense": "dense"}[peer],
        ratio=ratio,
        paper_ratio=PUBLISHED[peer],
        setting=f"{SETTING}, rank {rank}, {compute_s:g} s of computing",
        holds=is_reached(ratio, PUBLISHED[peer]),
        details={
            name: {
                "step_s": round(one.step_s, 4),
                "least_s": round(min(one.steps_s), 4),
                "most_s": round(max(one.steps_s), 4),
                "sent_bytes": round(one.sent_bytes),
            }
            for name, one in timed.items()
        },
    )


def methods(rank: int) -> dict[str, object]:
    """The three of the paper; both compressors with feedback."""
    return {
        "dense": "dense",
        "power": {"error_feedback": {"powersgd": {"rank": rank}}},
        "acp": {"error_feedback": {"acp_sgd": {"rank": rank}}},
    }


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        parts = {
            "norm1": (WIDTH,),
            "qkv": (3 * WIDTH, WIDTH),
            "out": (WIDTH, WIDTH),
            "norm2": (WIDTH,),
            "up": (4 * WIDTH, WIDTH),
            "down": (WIDTH, 4 * WIDTH),
        }
        found |= {f"{layer}.{name}": shape for name, shape in parts.items()}
    return found
