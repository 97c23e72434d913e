"""A model in four stages over slow links: ours beside torch.distributed.pipelining, on real hosts in the laboratory.

    python benchmarks/pipeline.py [--rates 100mbit,1gbit,unshaped] [--schedules gpipe,one_f_one_b] [--alternations 5]
    python benchmarks/pipeline.py --quick       # 4 minutes: 100 Mbit/s, 1F1B, hardly any loss; no record

Needs root and iproute2 (see `gossamer doctor`). A GPT of 14.4 million parameters, a plain module, trains in 4 stages
of one thread each on 8 micro-batches of 1 x 256 tokens. Both have the same weights, sequences, cuts and optimizer, and
take turns: `ratio_to_peer` is the median of the tokens/s of pairs of neighboring rounds. Bytes: what all ranks of
ours metered, against the plan's forecast (exactly) and the interfaces' own counters. Loss: after --loss-steps on links
that are not shaped, since no link changes it. `cpu_s`: processor seconds of a step, of all hosts together. About 50
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from pipeline import setting
from pipeline.rounds import UNSHAPED, Length, Method, measure
from result import publish, ratio

PEERS = {"gpipe": "ScheduleGPipe", "one_f_one_b": "Schedule1F1B"}
CODECS = ("bfloat16", "int8")  # of the boundary, in 1F1B
FIRST, TRACER = "one_f_one_b", "torch_tracer"
QUICK = {"rates": "100mbit", "schedules": FIRST, "alternations": 2, "steps": 3, "warm": 1, "loss_steps": 6}

Found = dict[tuple[str, Method], list[dict[str, Any]]]  # (rate, method) -> its rounds


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds for speed on every link, and one for the loss of each method."""

    speed: Found
    loss: dict[Method, dict[str, Any]]
    rows: int  # sequences per step


def main() -> None:
    asked = arguments()
    rates, schedules = asked.rates.split(","), asked.schedules.split(",")
    found: Found = {}
    length = Length(asked.steps, asked.warm, asked.rows)
    for rate, method in turns(rates, schedules, asked.alternations):
        found.setdefault((rate, method), []).append(told(rate, method, length))
    losses = {}
    for method in methods(schedules[-1]):
        losses[method] = told(UNSHAPED, method, Length(asked.loss_steps - 1, 1, asked.rows))
    measured = Measured(found, losses, asked.rows)
    rows = [row_of(measured, rate, method) for rate, method in found]
    figures = {"quick": asked.quick, "setting": described(asked), "targets": targets(rows), "rows": rows}
    if not asked.json:
        print("\n".join(lines(rows)))
    if asked.quick:  # no record: too short to be one
        print(json.dumps({**figures, "command": " ".join(["python", "benchmarks/pipeline.py", *sys.argv[1:]])}))
    else:
        publish("pipeline", figures)


def arguments() -> argparse.Namespace:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--rates", default=f"100mbit,1gbit,{UNSHAPED}")
    read.add_argument("--schedules", default="gpipe,one_f_one_b")
    read.add_argument("--alternations", type=int, default=5)
    read.add_argument("--steps", type=int, default=8, help="timed ones of a round")
    read.add_argument("--warm", type=int, default=2)
    read.add_argument("--rows", type=int, default=8, help="sequences per step, in 8 micro-batches")
    read.add_argument("--loss-steps", type=int, default=60)
    read.add_argument("--quick", action="store_true")
    read.add_argument("--json", action="store_true", help="no table")
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    if "--quick" in sys.argv[1:]:
        read.set_defaults(**{k: v for k, v in QUICK.items() if k not in given})
    return read.parse_args()


def methods(schedule: str) -> list[Method]:
    """The rows of a schedule; neighbors are pairs."""
    exact = [Method("plain", schedule), Method("torch", schedule, peer=PEERS[schedule])]
    coded = [Method(codec, schedule, codec) for codec in CODECS]
    return [*exact, *coded] if schedule == FIRST else exact


def turns(rates: list[str], schedules: list[str], alternations: int) -> Iterator[tuple[str, Method]]:
    """All rounds in the order in which they run; who goes first alternates."""
    for turn in range(alternations):
        for rate in rates:
            for schedule in schedules:
                for method in methods(schedule)[:: 1 if turn % 2 == 0 else -1]:
                    yield rate, method
    yield rates[0], Method(TRACER, FIRST, peer=f"tracer:{PEERS[FIRST]}")


def told(rate: str, method: Method, length: Length) -> dict[str, Any]:
    result = measure(method, rate, length)
    said = result.get("error") or f"{result['step_s']:.3f} s per step, loss {result['losses'][-1]:.5f}"
    print(f"{method.name} {method.schedule} {rate}: {said} ({result['seconds']} s)", file=sys.stderr, flush=True)
    return result


def row_of(measured: Measured, rate: str, method: Method) -> dict[str, Any]:
    """One method on one link."""
    some = measured.speed[rate, method]
    good = [r for r in some if "error" not in r]
    row: dict[str, Any] = {
        "method": method.name,
        "peer": bool(method.peer),
        "schedule": method.schedule,
        "rate": rate,
        "rounds": len(some),
    }
    if not good:
        return {**row, "error": some[0]["error"]}
    step_s = median(s for r in good for s in r["steps_s"])
    each = [r["step_s"] for r in good]
    row |= {
        "step_s": round(step_s, 4),
        "step_s_of_rounds": [round(s, 4) for s in each],
        "spread": round((max(each) - min(each)) / median(each), 4),
        "tokens_per_s": round(measured.rows * setting.SEQUENCE / step_s, 1),
        "cpu_s": round(median(r["cpu_s"] for r in good), 4),
        "ratio_to_peer": against_peer(measured, rate, method),
        "loss": round(good[-1]["losses"][-1], 6),
    }
    return {**row, **bytes_of(good, measured.rows), **loss_of(measured, method)}


def against_peer(measured: Measured, rate: str, method: Method) -> dict[str, Any] | None:
    """Tokens/s of ours over the peer's, from rounds of the same turn."""
    if method.peer:
        return None
    peer = next(m for r, m in measured.speed if r == rate and m.peer and m.schedule == method.schedule)
    pairs = zip(measured.speed[rate, peer], measured.speed[rate, method], strict=True)
    times = [(theirs["step_s"], ours["step_s"]) for theirs, ours in pairs if "step_s" in theirs and "step_s" in ours]
    return ratio([theirs for theirs, _ in times], [ours for _, ours in times]) if times else None


def bytes_of(good: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """Per step, of all hosts. The peer's are its interfaces' alone, headers and all."""
    counted = round(mean(r["interface_bytes"] for r in good))
    if "wire_bytes" not in good[0]:
        return {"wire_bytes": counted, "interface_bytes": counted, "forecast_bytes": None}
    sent = good[-1]["wire_bytes"]
    tensors = 2 * (setting.STAGES - 1) * rows * setting.SEQUENCE * setting.WIDTH * 4  # there and back, float32
    boundary = sent - good[-1]["agreement_bytes"]
    return {
        "wire_bytes": sent,
        "forecast_bytes": good[-1]["forecast_bytes"],
        "metered_equals_forecast": all(r["metered_equals_forecast"] for r in good),
        "interface_bytes": counted,
        "interface_over_payload": round(counted / sent, 4),
        "boundary_bytes": boundary,
        "boundary_fewer_than_float32": round(tensors / boundary, 4),
        "compute_share_of_rank_0": round(median(r["compute_s"] / r["step_s"] for r in good), 4),
    }


def loss_of(measured: Measured, method: Method) -> dict[str, Any]:
    """After the longer run, and how far that is from the exact one's, relative."""
    exact = next((r for m, r in measured.loss.items() if m.name == "plain"), {}).get("losses")
    found = measured.loss.get(method, {}).get("losses")
    if not exact or not found:
        return {}
    differences = [abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True)]
    return {
        "loss_steps": len(found),
        "loss_after": round(found[-1], 6),
        "loss_difference": round(differences[-1], 8),
        "loss_difference_worst": round(max(differences), 8),
    }


def targets(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What it is to show: bytes as forecast, 3.7 times fewer in int8, loss within 0.001, 0.98 of the peer's speed."""
    ours = [r for r in rows if not r["peer"] and "error" not in r]
    ratios = [r["ratio_to_peer"]["median"] for r in ours if r["ratio_to_peer"]]
    return {
        "bytes_as_forecast": all(r["metered_equals_forecast"] for r in ours),
        "interface_over_payload": max((r["interface_over_payload"] for r in ours), default=None),
        "int8_fewer": min((r["boundary_fewer_than_float32"] for r in ours if r["method"] == "int8"), default=None),
        "int8_loss_difference": next((r["loss_difference"] for r in ours if r["method"] == "int8"), None),
        "least_ratio_to_peer": min(ratios, default=None),
    }


def described(asked: argparse.Namespace) -> dict[str, Any]:
    told = ("alternations", "steps", "warm", "loss_steps")
    return {
        "model": {"blocks": setting.BLOCKS, "width": setting.WIDTH, "parameters": 14_492_160},
        "stages": setting.STAGES,
        "cuts": setting.CUTS,
        "microbatches": setting.MICROBATCHES,
        "tokens_per_step": asked.rows * setting.SEQUENCE,
        **{name: getattr(asked, name) for name in told},
    }


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows for people."""
    yield f"{'method':<14}{'schedule':<14}{'rate':<10}{'s/step':>8}{'spread':>8}{'of peer':>9}{'MB/step':>9}{'loss':>9}"
    for row in sorted(rows, key=lambda r: (r["rate"], r["schedule"], r.get("step_s", 0.0))):
        where = f"{('' if row['peer'] else '* ') + row['method']:<14}{row['schedule']:<14}{row['rate']:<10}"
        if "error" in row:
            yield where + row["error"]
            continue
        of_peer = f"{row['ratio_to_peer']['median']:.3f}" if row["ratio_to_peer"] else "-"
        sent = f"{row['wire_bytes'] / 1e6:.2f}"
        yield f"{where}{row['step_s']:>8.3f}{row['spread']:>8.1%}{of_peer:>9}{sent:>9}{row['loss']:>9.5f}"
    yield "* ours"


if __name__ == "__main__":
    main()
