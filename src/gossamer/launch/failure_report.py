"""Failure reports: the failure of one rank, the root cause among several, and the text block for the user."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossamer.launch.paths import lacks_checkpoint
from gossamer.process.exit_codes import BAD_INPUT, PEER_LOST, exit_text
from gossamer.process.json_lines import Said
from gossamer.spec.odd_one_out import ranked

What = Literal["exited", "stopped", "silent", "hung", "host lost"]
_WIDTH = 100
_COPIED = ("log", "all logs", "next")  # rows that people copy from: never wrapped
_PEER_LOST_TEXT = re.compile(
    r"connection (was )?(closed|reset) by (remote )?peer|broken pipe|socket closed|remote process exited", re.IGNORECASE
)
_GAVE_UP = re.compile(r"timed out|\btimeout\b", re.IGNORECASE)  # in words of gloo, of torch's store, and of our own
_PEER_LOST_KIND = re.compile(r"|RuntimeError|Dist\w*Error")  # of torch and its backends; "": the kind is unknown


class RankFailure(Said):
    """The failure of one rank, as its own supervisor observed it."""

    rank: int
    host: int
    hostname: str
    pid: int
    what: What
    exit_code: int = 0  # meaningful for "exited"; minus the signal's number
    kind: str = ""  # class of the exception, from the rank's error report
    message: str = ""  # from the error report, else the last line of its log
    place: str = ""  # the last line of the user's code that it was in
    cause: str  # likely cause, in words
    step: int = -1
    phase: str = ""
    op: str = ""
    sequence: int = -1
    log: str = ""
    age_s: float = 0.0  # age when it was sent: clocks of hosts are never compared
    by_us: bool = False  # ended by its supervisor after something else had failed

    @property
    def gave_up_waiting(self) -> bool:
        """Whether the rank timed out waiting for a peer, which may still be alive."""
        return self.is_collateral and not self.by_us and _GAVE_UP.search(self.message) is not None

    @property
    def is_collateral(self) -> bool:
        """Whether the rank failed only because another rank was lost or its supervisor terminated it."""
        if self.by_us or self.exit_code == PEER_LOST or self.kind == "PeerLost":
            return True
        is_exit = self.exit_code > 0 and self.exit_code != BAD_INPUT
        is_torchs = _PEER_LOST_KIND.fullmatch(self.kind) is not None  # else the user's own connection: data, a tracker
        return is_exit and is_torchs and bool(_PEER_LOST_TEXT.search(self.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dated:
    """A failure with its time in seconds on this supervisor's clock."""

    failure: RankFailure
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The root cause and the failures that came after it.

    `first`: the root cause; `others`: failed by themselves, later; `collateral`: lost a peer, or were terminated by the
    supervisor.
    """

    first: RankFailure
    others: tuple[RankFailure, ...] = ()
    collateral: tuple[RankFailure, ...] = ()


def find_root_cause(failures: Sequence[Dated]) -> RootCause:
    """Return the root cause of at least one failure: the earliest one that is not collateral.

    A collateral failure is the root cause only when there are no others.
    """
    ordered = [dated.failure for dated in sorted(failures, key=lambda d: (d.at_s, d.failure.rank))]
    own = [f for f in ordered if not f.is_collateral]
    first = (own or ordered)[0]
    return RootCause(
        first=first,
        others=tuple(f for f in own if f is not first),
        collateral=tuple(f for f in ordered if f.is_collateral and f is not first),
    )


def format_report(found: RootCause, *, rundir: Path) -> str:
    """Format the bordered report: failing rank, last position, likely cause, other failures, logs, next command."""
    first = found.first
    where = f"step {first.step}, {first.phase}" if first.step >= 0 else (first.phase or "before the first step")
    if first.op:
        where += f", last operation {first.op}" + (f" (number {first.sequence})" if first.sequence >= 0 else "")
    alike = [f for f in found.others if f.cause == first.cause]  # several ranks share the cause
    lost = [f for f in found.collateral if not f.by_us]
    ended = [f for f in found.collateral if f.by_us]
    who = f"none alone: {_ranks([first, *alike])} failed alike" if alike else _who(first)
    if lost and first.is_collateral and not first.by_us:  # nobody failed of itself
        who, lost = f"none: {_ranks([first, *lost])} lost each other; look at the network between their hosts", []
    rows = [
        ("first failing rank", who),
        ("stood at", where),
        ("likely cause", f"{first.cause}\nat {first.place}" if first.place else first.cause),
        ("failed as well", "; ".join(_brief(f) for f in found.others if f not in alike)),
        ("lost their peer", _ranks(lost)),
        ("ended by us", _ranks(ended)),
        ("log", first.log),
        ("all logs", str(rundir / "logs")),
        ("next", _next(first, rundir)),
    ]
    return _bordered("the run failed", [(name, text) for name, text in rows if text])


def _next(first: RankFailure, rundir: Path) -> str:
    """Return the command to continue, "" where it would fail the same way or restart from nothing."""
    return "" if first.kind == "CheckpointMismatch" or lacks_checkpoint(rundir) else f"gossamer resume {rundir}"


def _who(first: RankFailure) -> str:
    if first.what == "host lost":
        return f"every rank of host {first.hostname}"
    return f"{first.rank} on host {first.hostname} (process {first.pid})"


def _brief(failure: RankFailure) -> str:
    who = _who(failure) if failure.what == "host lost" else f"rank {failure.rank} on {failure.hostname}"
    return f"{who} ({failure.cause.splitlines()[0][:120]})"


def _ranks(failures: Sequence[RankFailure]) -> str:
    """ "ranks 0, 1 on a; rank 5 on b"."""
    by_host: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda f: f.rank):
        by_host.setdefault(failure.hostname, []).append(failure.rank)
    return "; ".join(f"{ranked(ranks)} on {host}" for host, ranks in by_host.items())


def _bordered(title: str, rows: Sequence[tuple[str, str]]) -> str:
    margin = max(len(name) for name, _ in rows) + 2
    lines: list[str] = []
    for name, text in rows:
        room = len(text) if name in _COPIED else _WIDTH - margin - 4
        pieces = [piece for line in text.splitlines() for piece in textwrap.wrap(line, room, break_on_hyphens=False)]
        lines += [f"{name if i == 0 else '':{margin}}{piece}" for i, piece in enumerate(pieces)]
    width = max(*(len(line) for line in lines), len(title) + 4)
    top = f"+- {title} {'-' * (width - len(title) - 1)}+"
    return "\n".join([top, *(f"| {line:{width}} |" for line in lines), f"+{'-' * (width + 2)}+"])


def cause_of_exit(code: int, *, said: str, out_of_memory: str, peak: str) -> str:
    """Return the likely cause of exit code `code` in words.

    said: the rank's last message; out_of_memory: the control group in which the kernel killed a process for lack of
    memory, "" for none; peak: the rank's largest resident memory.
    """
    if code == -9 and out_of_memory:
        return f"killed by the kernel for lack of memory: {out_of_memory}; the rank held {peak} at most"
    signals = {
        -9: f"killed by SIGKILL from outside (kill -9, a scheduler, or the kernel for lack of memory, though its "
        f"control group counts none); it held {peak} at most",
        -15: "ended by SIGTERM from outside before it could save",
        -11: "crashed in native code (SIGSEGV); its stack is at the end of its log",
        -7: "crashed on memory that is not there (SIGBUS): a full /dev/shm, or a file cut short while mapped",
        -6: "aborted in native code (SIGABRT); the reason is at the end of its log",
    }
    return signals.get(code) or said or f"ended with {exit_text(code)} and said nothing"
