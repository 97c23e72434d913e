"""The commands `gossamer lab`: an emulated network of real hosts and shaped links on one machine."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any

from cyclopts import App, Parameter

from gossamer.cli.output import ReaderGone
from gossamer.netlab import Lab, LabTopology, LinkEvent, end, lab_unavailable, standing, sweep
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.units import read_rate, show_bytes, show_gib, show_rate

AsJson = Annotated[bool, Parameter(name="--json", negative="")]
app = App(name="lab", help="Emulate hosts and shaped links on this machine (network namespaces; Linux, root).")


@Parameter(name="*")
@dataclass(frozen=True)
class LabRequest:
    """The emulated network, as written on the command line."""

    hosts: int = 2
    "How many hosts."
    rate: str | None = None
    "Every host's link, each direction: 100mbit. Default: no limit."
    islands: str | None = None
    "2x3 is two islands of three hosts; 3,1 is one of three and one of one."
    inter_rate: str | None = None
    "The uplink of every island, each direction: 50mbit."
    delay: float = 0.0
    "One-way latency between any two hosts, in milliseconds."
    cpu: str | None = None
    "CPU cores per host: 1.0,0.5. All are scaled down if the sum exceeds 0.8 of this machine's cores."
    memory: str | None = None
    "Memory limit: 2gib for every host, or one per host: 1gib,2gib."

    def topology(self) -> LabTopology:
        """Return the topology that the emulated network is built from; raises BadInput."""
        return LabTopology(
            self.hosts,
            rate_bytes_per_s=_read_rate(self.rate, key="rate"),
            between_bytes_per_s=_read_rate(self.inter_rate, key="inter-rate"),
            islands=_islands(self.islands) if self.islands else (),
            delay_s=self.delay / 1000,
            cpu=_numbers(self.cpu) if self.cpu else (),
            memory_bytes=tuple(_memory(text) for text in self.memory.split(",")) if self.memory else (),
        )


@app.command(name="run")
def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    wanted: LabRequest | None = None,
    event: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    as_json: AsJson = False,
) -> int:
    """Run a command on every host, e.g. `gossamer lab run --hosts 4 --rate 100mbit -- python train.py`.

    Ctrl-C once is passed on to the hosts; twice stops at once.

    Parameters
    ----------
    command
        What every host runs, after `--`, with the environment of its rank (RANK, WORLD_SIZE, MASTER_ADDR, ...).
    event
        What happens to the links meanwhile: "10s slow h1 5mbit", "20s cut h1-h2", "30s heal h1". May be repeated.
    as_json
        End with one JSON object: exit codes, CPU cores that each host really got, bytes per link.
    """
    changes = tuple(LinkEvent.parse(text) for text in event)
    ended: list[tuple[int, int]] = []
    with _asked_to_stop(), Lab((wanted or LabRequest()).topology()) as lab:
        shares = lab.calibrate()
        _say(_described(lab, shares))
        begun = time.monotonic()
        one_folder = os.environ.get("GOSSAMER_RUN_NAME") or time.strftime(f"%Y%m%d-%H%M%S-{lab.prefix}")
        with _passed_on(lab):
            codes = lab.run(
                command,
                env=lambda _: {"GOSSAMER_RUN_NAME": one_folder},
                output=lambda host, line: _say(line, tag=f"h{host}"),
                exited=lambda host, code: ended.append((host, code)),
                changes=changes,
            )
        first = next((host for host, code in ended if code), None)
        about: dict[str, Any] = {
            "exit_codes": list(codes),
            "first_failed": first,
            "seconds": round(time.monotonic() - begun, 3),
            "cpu_shares": list(shares) or None,
            "bytes_per_link": {name: {"tx": tx, "rx": rx} for name, (tx, rx) in lab.counters().items()},
            "killed_for_memory": [f"h{host}" for host in lab.killed_for_memory()],
        }
    _report(about)
    if as_json:
        _write_json(about)
    return _exit_code(codes[first]) if first is not None else 0


@app.command(name="up")
def up(*, wanted: LabRequest | None = None, as_json: AsJson = False) -> int:
    """Create an emulated network and keep it until Ctrl-C; print the command that enters each host.

    Parameters
    ----------
    as_json
        End with one JSON object, written as soon as the hosts exist: name, hosts, CPU cores that each really got.
    """
    with _asked_to_stop(), Lab((wanted or LabRequest()).topology()) as lab:
        shares = lab.calibrate()
        hosts = [{"address": lab.address(host), "enter": lab.entry(host)} for host in range(lab.topology.hosts)]
        _say(f"{lab.prefix}: {_described(lab, shares)}")
        for number, host in enumerate(hosts):
            _say(f"{host['address']}: {host['enter']}", tag=f"h{number}")
        _say("standing until Ctrl-C")
        if as_json:
            _write_json({"laboratory": lab.prefix, "hosts": hosts, "cpu_shares": list(shares) or None})
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            sys.stderr.write("[lab] taking it down\n")
    return 0


@app.command(name="down")
def down(prefix: str | None = None, *, as_json: AsJson = False) -> int:
    """Remove laboratories whose owner is gone, or one that stands, by its name.

    Parameters
    ----------
    prefix
        A standing laboratory, as `lab up` calls it: its owner is asked to end, then it is removed.
    as_json
        End with one JSON object: the names of what was removed, and of what still stands.
    """
    reason = lab_unavailable()
    if reason is not None:
        raise BadInput(reason)
    gone = sweep()
    if prefix is not None and prefix not in gone:
        if prefix not in standing():
            known = ", ".join(standing()) or "none"
            do = f"name one that is running (now: {known})"
            raise bad_input(wanted="the name of a running emulated network", got=repr(prefix), do=do)
        end(prefix)
        gone = (*gone, prefix)
    _say(f"removed: {', '.join(gone) or 'nothing was left over'}")
    left = standing()
    for name in left:
        _say(f"still standing, in use: {name} (gossamer lab down {name} ends it)")
    if as_json:
        _write_json({"removed": list(gone), "standing": list(left)})
    return 0


def _read_rate(text: str | None, *, key: str) -> float:
    return math.inf if text is None else read_rate(text, key=key)


def _islands(text: str) -> tuple[int, ...]:
    if match := re.fullmatch(r"([0-9]{1,3})x([0-9]{1,3})", text):
        return (int(match.group(2)),) * int(match.group(1))
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", text):
        return tuple(int(size) for size in text.split(","))
    raise bad_input(
        wanted="islands such as 2x2 or 3,1", got=repr(text), do="write the hosts of each island", key="islands"
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        do = "write the cores of each host"
        raise bad_input(wanted="numbers of CPU cores such as 1.0,0.5", got=repr(text), do=do, key="cpu") from None


def _memory(text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg])i?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise bad_input(
            wanted="memory such as 512mib or 2gib", got=repr(text), do="write a number and a unit", key="memory"
        )
    return int(float(match.group(1)) * 1024 ** (1 + "kmg".index(match.group(2).lower())))


def _described(lab: Lab, shares: tuple[float, ...]) -> str:
    top = lab.topology
    parts = [f"{top.hosts} hosts, links {_rate(top.rate_bytes_per_s)}"]
    if len(top.sizes()) > 1:
        parts.append(f"islands of {'+'.join(map(str, top.sizes()))} with uplinks {_rate(top.between_bytes_per_s)}")
    if top.delay_s:
        parts.append(f"{top.delay_s * 1000:g} ms one way")
    if top.memory():
        parts.append("memory " + " ".join(show_gib(limit) for limit in top.memory()))
    if shares:
        pairs = zip(shares, lab.cores, strict=True)
        parts.append("real cores (granted) " + " ".join(f"{real:.2f} ({granted:.2f})" for real, granted in pairs))
    return "; ".join(parts)


def _rate(bytes_per_s: float) -> str:
    return show_rate(bytes_per_s) if bytes_per_s < 1e12 else "not shaped"


def _report(about: dict[str, Any]) -> None:
    for name, count in about["bytes_per_link"].items():
        _say(f"{name} sent {show_bytes(count['tx'])}, received {show_bytes(count['rx'])}")
    for host in about["killed_for_memory"]:
        _say(f"{host} reached its memory limit, and the kernel killed a process")
    if about["first_failed"] is not None:
        _say(f"h{about['first_failed']} failed first; exit codes {about['exit_codes']}")


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code  # as shells say "ended by a signal"


def _say(line: str, *, tag: str = "lab") -> None:
    _write(f"[{tag}] {line}\n")


def _write_json(about: dict[str, Any]) -> None:
    _write(json.dumps(about) + "\n")


def _write(text: str) -> None:
    """Write as it is, colors of the hosts' programs included."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGone(*error.args) from None


@contextmanager
def _asked_to_stop() -> Iterator[None]:
    """End the `with` block on SIGTERM as on Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _passed_on(lab: Lab) -> Iterator[None]:
    """Pass the first SIGINT or SIGTERM on to the hosts, which may save and stop; stop everything at the second."""
    came: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        os.write(sys.stderr.fileno(), b"[lab] passed on to the hosts; once more stops now\n")
        lab.signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
