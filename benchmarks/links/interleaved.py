"""Several methods on links of their own, trained at once in turns of a few steps: see `turns`.

Each program starts while all others wait before a step, so what it measures of links and machine before it trains is
measured alone. Its first turn does not count, nor does the first step of any turn, which finds caches of others.

A yardstick (`yardstick_for`) tells how fast the machine was when the first program started, and in each round of turns:
hosts that compute and exchange nothing.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from links import setting
from links.method import ALONE, KNOWN, UNTHROTTLED, Method
from links.rounds import Length, Link, measure
from links.turns import ended, give

HOSTS_OF_YARDSTICK = 2
_AROUND = 2  # turns of a yardstick, before and after the start of the first program; its own first does not count
_LOOK_S, _START_S, _STEP_S = 0.02, 300.0, 60.0  # what a start, and a step, may take at most


@dataclass(frozen=True, slots=True)
class Program:
    """A method on a link, in turns of `steps` steps."""

    name: str  # of its files
    method: Method
    link: Link
    model: str
    rounds: int
    steps: int

    @property
    def length(self) -> Length:
        """All steps that count; the limit is that of all programs together, and is not kept here."""
        return Length(self.steps * self.rounds, self.steps, 36_000.0)


def programs(
    methods: Sequence[Method], links: Sequence[Link], free: Link, *, model: str, rounds: int, steps: int
) -> list[Program]:
    """Return every method on every link, and on unlimited links the denominator and what a host computes alone."""
    pairs = [(KNOWN[UNTHROTTLED], free), (ALONE, free), *((m, link) for link in links for m in methods)]
    found = dict[str, tuple[Method, Link]]()
    for method, link in pairs:
        found.setdefault(json.dumps([method.name, link.named()]), (method, link))
    return [Program(f"p{i}", *pair, model, rounds, steps) for i, pair in enumerate(found.values())]


def yardstick_for(one: Program) -> Program:
    """Return the yardstick beside programs like `one`: hosts that compute as much each, and exchange nothing.

    Its turns are one before the first program starts, one after that, and one in each round that counts.
    """
    return replace(one, name="yardstick", method=ALONE, link=Link(HOSTS_OF_YARDSTICK), rounds=one.rounds + _AROUND)


def run(
    all_of_them: Sequence[Program],
    say: Callable[[str], None],
    *,
    slowest: float = math.inf,
    yardstick: Program | None = None,
) -> list[dict[str, Any]]:
    """Return the figures of every program, in their order, then of the yardstick, where there is one.

    Raises SystemExit where one hangs, or says nothing.

    slowest: a program whose first turn takes more than so many times that of the first program ends with that turn;
    its figures are `error`, which says so, and `step_s` of that turn.
    """
    with tempfile.TemporaryDirectory() as text:
        folder, started, found = Path(text), dict[str, subprocess.Popen[str]](), dict[str, dict[str, Any]]()
        first_s = math.inf

        def begin(one: Program) -> None:
            started[one.name] = _started(folder, one)
            _wait(folder, one, -1, started[one.name], _START_S)
            say(f"{one.method.name} on {one.link.hosts} hosts, {one.link.rate}: at its first step")

        def turn(one: Program, number: int) -> float:
            """Return the seconds of a turn."""
            began = time.monotonic()
            give(folder, one.name, number, one.link.hosts)
            last = number == one.rounds
            _wait(folder, one, number, started[one.name], _START_S + one.steps * _STEP_S, to_end=last)
            return time.monotonic() - began

        try:
            if yardstick is not None:
                begin(yardstick)
                for number in range(_AROUND):
                    turn(yardstick, number)
            for one in all_of_them:
                begin(one)
                if yardstick is not None and one is all_of_them[0]:
                    turn(yardstick, _AROUND)
            for number in range(all_of_them[0].rounds + 1):
                if yardstick is not None and number:
                    turn(yardstick, _AROUND + number)
                for one in all_of_them[:: 1 if number % 2 == 0 else -1]:
                    if one.name in found:
                        continue
                    turn_s = turn(one, number)
                    first_s = min(first_s, turn_s) if one is all_of_them[0] else first_s
                    if number == 0 and turn_s > slowest * first_s:
                        step_s = turn_s / one.steps
                        why = f"left out after its first turn, {step_s:.1f} s a step"
                        found[one.name] = {"error": why, "step_s": step_s}
                        say(f"{one.method.name}: {why}")
                        started[one.name].terminate()
            everyone = [*all_of_them, *([] if yardstick is None else [yardstick])]
            for one in everyone:
                if one.name not in found:
                    found[one.name] = _said(one, started[one.name].communicate()[0])
        finally:
            for process in started.values():
                process.terminate()
                process.wait()
        return [found[one.name] for one in everyone]


def speeds(yardstick: Sequence[dict[str, Any]]) -> list[float]:
    """Return by round how much longer the yardstick's steps took than around the start of the first program.

    `yardstick`: its figures by turn.
    """
    at_start_s = median(s for turn in yardstick[:_AROUND] for s in turn["steps_s"])
    return [turn["step_s"] / at_start_s for turn in yardstick[_AROUND:]]


def _said(one: Program, output: str) -> dict[str, Any]:
    """Return the figures that a program printed last."""
    if not output.strip():
        raise SystemExit(f"{one.method.name} at {one.link.rate}: the program ended without a figure")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def _started(folder: Path, one: Program) -> subprocess.Popen[str]:
    given = {**asdict(one), "folder": str(folder)}
    argv = [sys.executable, "-m", "links.interleaved", json.dumps(given)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)


def _wait(
    folder: Path, one: Program, number: int, process: subprocess.Popen[str], limit_s: float, *, to_end: bool = False
) -> None:
    """Return when the program has ended its turn; after its last one, when it has ended."""
    end = time.monotonic() + limit_s
    while process.poll() is None and (to_end or not ended(folder, one.name, number, one.link.hosts)):
        if time.monotonic() > end:
            raise SystemExit(f"{one.method.name} at {one.link.rate}: no end of turn {number} within {limit_s:.0f} s")
        time.sleep(_LOOK_S)


def by_turn(found: dict[str, Any], one: Program) -> list[dict[str, Any]]:
    """Return the figures of each turn, without its first step: that follows a step of another program."""
    if "error" in found:
        return [found]
    turns = [found["steps_s"][at + 1 : at + one.steps] for at in range(0, len(found["steps_s"]), one.steps)]
    tokens = setting.tokens(one.link.hosts)
    return [{**found, "steps_s": t, "step_s": median(t), "tokens_per_s": tokens / median(t)} for t in turns]


def main() -> None:
    given = json.loads(sys.argv[1])
    link = Link(**{**given["link"], "islands": tuple(given["link"]["islands"])})
    one = Program(given["name"], Method(**given["method"]), link, given["model"], given["rounds"], given["steps"])
    turns = [given["folder"], one.name, str(one.steps)]
    print(json.dumps(measure(one.method, link, one.length, model=one.model, turns=turns)), flush=True)


if __name__ == "__main__":
    main()
