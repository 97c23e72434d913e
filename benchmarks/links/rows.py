"""From rounds and losses to the rows of the table."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import mean, median
from typing import Any

from links import setting
from links.losses import FP16_HOOK
from links.method import ALONE, KNOWN, UNTHROTTLED, Method
from links.rounds import UNSHAPED, Link
from links.studies import Subject, seconds_to
from links.sweep import Turn

Rounds = list[tuple[Turn, dict[str, Any]]]


def denominators(rounds: Rounds) -> dict[int, dict[str, Any]]:
    """By hosts: seconds of a step of dense without shaping, and of one that exchanges nothing; medians."""
    found: dict[int, dict[str, Any]] = {}
    for hosts in sorted({t.link.hosts for t, _ in rounds}):
        here = [(t, r) for t, r in rounds if t.link.hosts == hosts and t.link.rate == UNSHAPED and "error" not in r]
        free = [r["step_s"] for t, r in here if t.method.name == UNTHROTTLED]
        alone = [r["step_s"] for t, r in here if t.method.name == ALONE.name]
        if not free:
            raise SystemExit(f"dense on unshaped links of {hosts} hosts has no figure: nothing can be held against it")
        steps = [s for t, r in here if t.method.name == UNTHROTTLED for s in r["steps_s"]]
        found[hosts] = {
            "step_s": median(steps),
            "rounds": [round(s, 4) for s in free],
            "spread": round((max(free) - min(free)) / median(free), 4),
            "tokens_per_s": round(setting.tokens(hosts) / median(steps), 1),
            "no_exchange_step_s": median(alone) if alone else None,
        }
    return found


def rows_of(rounds: Rounds, free: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """One per method and link, without losses."""
    groups: dict[str, Rounds] = defaultdict(list)
    for turn, result in rounds:
        if turn.method.name != ALONE.name:
            groups[json.dumps([turn.method.name, turn.link.named()])].append((turn, result))
    return [_row(some, free[some[0][0].link.hosts]) for some in groups.values()]


def subject(row: dict[str, Any]) -> Subject | None:
    """What has the loss of a row; None for a peer whose mathematics nothing of ours repeats."""
    method = KNOWN.get(row["method"])
    islands = tuple(row["islands"])
    if method is not None and method.period > 1:
        return None  # its loss is not that of an exchange of gradients
    if method is not None and method.peer:
        exchange = method.like if method.like == FP16_HOOK else _of(method.like)
        return Subject(exchange, row["hosts"], model=row["model"]) if exchange and row["step_s"] else None
    return Subject(row["exchange"], row["hosts"], islands, model=row["model"]) if row.get("exchange") else None


def with_losses(
    rows: list[dict[str, Any]], found: dict[str, dict[str, Any]], margin: float
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """The rows with their losses; and by hosts the target: the loss of dense, and `margin` of it more."""
    targets = {
        hosts: (1 + margin) * found[key]["last_on_the_way"]
        for hosts, model in {(r["hosts"], r["model"]) for r in rows}
        if (key := Subject("dense", hosts, model=model).key()) in found
    }
    done = []
    for row in rows:
        what = subject(row)
        loss = found.get(what.key()) if what is not None else None
        target = targets.get(row["hosts"])
        if loss is None or not row["step_s"]:
            done.append(row)
            continue
        speed = setting.tokens(row["hosts"]) / row["step_s"]
        to_target = seconds_to(loss, target, tokens_per_s=speed) if target else None
        said = {k: loss[k] for k in ("final_loss", "final_losses", "lr")}
        done.append({**row, **said, "seconds_to_target": to_target, "loss_of_dense": _against(loss, found, row)})
    return done, targets


def _against(loss: dict[str, Any], found: dict[str, dict[str, Any]], row: dict[str, Any]) -> float | None:
    dense = found.get(Subject("dense", row["hosts"], model=row["model"]).key())
    return round(loss["final_loss"] / dense["final_loss"], 5) if dense else None


def _of(name: str) -> Any:
    method: Method | None = KNOWN.get(name)
    return method.exchange() if method is not None else None


def _row(some: Rounds, free: dict[str, Any]) -> dict[str, Any]:
    turn, _ = some[0]
    good = [r for _, r in some if "error" not in r]
    row: dict[str, Any] = {"method": turn.method.name, "peer": turn.method.peer, "model": turn.model}
    row |= _where(turn.link)
    row |= dict.fromkeys(("step_s", "wire_bytes", "exposed_share", "tokens_per_s", "share_of_unthrottled"))
    row |= {"peak_bytes": None, "final_loss": None, "seconds_to_target": None, "rounds": len(some)}
    if not good:
        return {**row, "error": some[0][1]["error"], "command": some[0][1]["command"]}
    middle = median if turn.method.period == 1 else mean
    step_s = middle([s for r in good for s in r["steps_s"]])
    row |= {
        "step_s": round(step_s, 4),
        "step_s_of_rounds": [round(r["step_s"], 4) for r in good],
        "steps": sum(len(r["steps_s"]) for r in good),
        "wire_bytes": round(mean(r["wire_bytes"] for r in good)),
        "exposed_share": _exposed(good, step_s, free["no_exchange_step_s"]),
        "tokens_per_s": round(setting.tokens(turn.link.hosts) / step_s, 1),
        "share_of_unthrottled": round(free["step_s"] / step_s, 4),
        "peak_bytes": max(r["peak_bytes"] for r in good),
    }
    last = good[-1]
    alone_s, unhidden_s = free["no_exchange_step_s"], last.get("forecast", {}).get("unhidden_s", 0.0)
    if alone_s and unhidden_s:  # what was computed before the first step, and what a host alone takes
        row |= {"floor_s": round(alone_s + unhidden_s, 4)}
        row |= {"share_at_floor": round(free["step_s"] / row["floor_s"], 4)}
    row |= {k: last[k] for k in ("exchange", "sync", "because", "version") if k in last}
    others = [r["exchange"] for r in good if r.get("exchange") != last.get("exchange")]
    return {**row, "exchange_of_other_rounds": others} if others else row


def _exposed(good: list[dict[str, Any]], step_s: float, alone_s: float | None) -> float | None:
    """Ours: waited for the wire after backward. Peers do not tell: what a step takes beyond one that sends nothing."""
    if "exposed_s" in good[0]:
        return round(median(r["exposed_s"] / r["step_s"] for r in good), 4)
    return round(max(0.0, 1 - alone_s / step_s), 4) if alone_s else None


def _where(link: Link) -> dict[str, Any]:
    named = link.named()
    return {"rate": named["rate"], "hosts": link.hosts, "round_trip_ms": 2 * link.delay_ms} | {
        k: named[k] for k in ("islands", "between")
    }
