"""Start workers on this machine and supervise them to their end."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.launch.control_channel import HostLine
from gossamer.launch.paths import errors_folder, log_file
from gossamer.launch.supervisor import RunEnd, Site, Supervisor
from gossamer.launch.worker_group import Limits, WorkerGroup
from gossamer.process import Command, EventLoop, HeartbeatServer
from gossamer.spec.errors import BadInput

_BACKLOG = 4096  # all ranks may knock before rank 0 answers


def to_stderr(text: str) -> None:
    """Write `text` to stderr as a line; what cannot be written (its reader, terminal or disk is gone) ends no run."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The command and settings of the workers of this host.

    env: added to this process's environment, which it overrides. echo: whether rank 0's output goes to the terminal as
    well as to its log. threads: compute threads per worker; 0: the processors this process may use, divided by
    `processes`. gives_word: the program ends through `run_worker`, so exit code 0 without a recorded exit (`LastWord`)
    is a failure. imports: modules that the program is going to import, so that it is done once for all workers. say:
    called with messages for the user. tick: called about twenty times a second (a live display draws there).
    """

    argv: tuple[str, ...]
    processes: int
    rundir: Path
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)
    echo: bool = True
    threads: int = 0
    generation: int = 0
    gives_word: bool = True
    imports: tuple[str, ...] = ()
    say: Callable[[str], None] = to_stderr
    tick: Callable[[], None] = _nothing

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise BadInput(f"wanted at least 1 process, got {self.processes}: give 1 or more", key="machines.processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Among:
    """The place of this host in a run over several hosts. `offset`: its first rank.

    Rank 0 listens on `address`:`port`. Host 0 hands it `listener`, a socket that already listens there, so that no
    other process takes the port; the launching function closes it. `interface`: the network device for the exchange, ""
    to let the backend choose.
    """

    host: int
    hostnames: tuple[str, ...]
    offset: int
    ranks: int
    address: str
    port: int
    interface: str = ""
    resume_step: int = -1
    shared: bool = True
    listener: socket.socket | None = None


def launch_local(
    argv: Sequence[str],
    processes: int,
    *,
    rundir: Path,
    heartbeat_s: float = 5.0,
    env: Mapping[str, str] | None = None,
    echo: bool = True,
    tick: Callable[[], None] = _nothing,
) -> int:
    """Start `processes` workers of `argv` on this machine and wait for them; return exit code 0, 2, 3 or 4.

    `argv` may be any program: its exit codes are used as they are. The reason of a failure goes to stderr, logs to
    rundir/logs, error reports of failing ranks to rundir/errors. `LaunchRequest` and `launch_here` have all settings.
    Call it from the main thread: Python delivers signals to no other thread.
    """
    limits = Limits(heartbeat_s=heartbeat_s)
    start = LaunchRequest(
        argv=tuple(argv),
        processes=processes,
        rundir=rundir,
        limits=limits,
        env=env or {},
        echo=echo,
        gives_word=False,
        tick=tick,
    )
    outcome = launch_here(start)
    if outcome.text:
        start.say(outcome.text)
    return outcome.exit_code


def launch_here(start: LaunchRequest) -> RunEnd:
    """Run the workers of `start` on this machine alone; return the exit code, text for the user and root cause."""
    listener = listen("127.0.0.1")
    among = Among(
        host=0,
        hostnames=(socket.gethostname(),),
        offset=0,
        ranks=start.processes,
        address="127.0.0.1",
        port=listener.getsockname()[1],
        listener=listener,
        interface=loopback(),
    )
    return launch_among(start, among)


def launch_among(start: LaunchRequest, among: Among, others: Mapping[int, socket.socket] | None = None) -> RunEnd:
    """Run this host's workers of a run over several hosts and return how the run ended.

    others: open connections to the other hosts' supervisors, by host.
    """
    for stale in errors_folder(start.rundir).glob("rank-*.json"):
        stale.unlink(missing_ok=True)
    loop = EventLoop()
    ranks = range(among.offset, among.offset + start.processes)
    server = HeartbeatServer(loop, ranks, generation=start.generation)
    line = HostLine(loop, host=among.host, others=others)
    site = Site(rundir=start.rundir, host=among.host, hostnames=among.hostnames, say=start.say, tick=start.tick)
    hostname = among.hostnames[among.host]
    try:
        with WorkerGroup(
            loop, server, host=among.host, hostname=hostname, rundir=start.rundir, limits=start.limits
        ) as crew:
            supervision = Supervisor(site, crew, line, loop=loop, limits=start.limits)
            jobs = [_job(start, among, server, local_rank) for local_rank in range(start.processes)]
            return supervision.run(jobs, start.imports)
    finally:
        line.close()
        server.close()
        loop.close()
        if among.listener is not None:
            among.listener.close()


def listen(address: str) -> socket.socket:
    """Return a listening socket on `address`, at a free port that no other process can take while it is open."""
    return socket.create_server((address, 0), backlog=_BACKLOG)


def loopback() -> str:
    """Return the name of this machine's loopback device, "" when there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


def _job(start: LaunchRequest, among: Among, server: HeartbeatServer, local_rank: int) -> Command:
    rank = among.offset + local_rank
    handed_over = (among.listener.fileno(),) if among.listener is not None and rank == 0 else ()
    ours = {
        "RANK": rank,
        "WORLD_SIZE": among.ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": start.processes,
        "MASTER_ADDR": among.address,
        "MASTER_PORT": among.port,
        "OMP_NUM_THREADS": start.threads or max(1, _processors() // start.processes),
        "PYTHONUNBUFFERED": 1,  # what a killed rank wrote is in its log
        "PYTHONFAULTHANDLER": 1,  # so is the stack of a crash
        "GOSSAMER_NODE_RANK": among.host,
        "GOSSAMER_NNODES": len(among.hostnames),
        "GOSSAMER_GENERATION": start.generation,
        "GOSSAMER_HEARTBEAT": server.address,
        "GOSSAMER_TOKEN": server.token,
        "GOSSAMER_HEARTBEAT_S": start.limits.heartbeat_s,
        "GOSSAMER_ERRORS": errors_folder(start.rundir).absolute(),
        "GOSSAMER_SHARED": int(among.shared),
    }
    if handed_over:
        ours["GOSSAMER_LISTENER"] = handed_over[0]
    if among.resume_step >= 0:
        ours["GOSSAMER_RESUME_STEP"] = among.resume_step
    if among.interface:
        ours |= {
            "GLOO_SOCKET_IFNAME": among.interface,
            "NCCL_SOCKET_IFNAME": f"={among.interface}",
        }  # = : this very one
    return Command(
        rank=rank,
        argv=start.argv,
        env={**os.environ, **{name: str(value) for name, value in ours.items()}, **start.env},
        log=log_file(start.rundir, rank),
        echo=start.echo and rank == 0,
        descriptors=handed_over,
        gives_word=start.gives_word,
    )


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
