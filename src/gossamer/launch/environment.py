"""Read rank, world size and addresses from a launcher's environment variables: the one module that does."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.spec.errors import BadInput

_FIRST_PORT, _PORTS = 20_000, 10_000  # below what systems hand out by themselves

TEACHER_TOKEN = "GOSSAMER_TEACHER_TOKEN"  # the shared secret of a teacher on another host and its students


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterAddress:
    """The address on which rank 0 listens for the other ranks, and who opens its socket."""

    host: str
    port: int
    listener: int = -1  # descriptor of the socket that the supervisor has opened; -1: rank 0 opens one
    has_store: bool = False  # whether the launcher keeps the store itself, as torchrun's agent does


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLink:
    """The ways by which a worker reports to the supervisor that started it; without one they lead nowhere."""

    heartbeat: str = ""  # "host:port" on which it listens; "": there is none
    token: str = ""
    heartbeat_s: float = 5.0
    box: int = -1  # descriptor of its position page; -1: there is none
    errors: str = ""  # folder for the error report of a failing rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgreement:
    """The agreement of all hosts' supervisors on one start of the ranks."""

    generation: int = 0  # one more at every restart: messages of older ones are ignored
    resume_step: int = -1  # newest checkpoint that every host holds; -1: not known here
    shared: bool = True  # whether all hosts see the same run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherRank:
    """The rank of one worker and its place among the hosts.

    `host` counts the hosts from 0.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    host: int
    hosts: int
    hostname: str
    launcher: str  # "gossamer" | "torchrun" | "srun" | "mpirun"
    master: MasterAddress
    supervisor: SupervisorLink = SupervisorLink()
    start: StartAgreement = StartAgreement()

    @property
    def is_alone(self) -> bool:
        """Return whether this rank is the only one."""
        return self.ranks == 1

    @property
    def own_directory(self) -> bool:
        """Return whether this host has a run directory that the other hosts do not see."""
        return self.hosts > 1 and not self.start.shared


def launcher_of(environ: Mapping[str, str]) -> str:
    """Return the launcher of this process: "gossamer", "torchrun", "srun" or "mpirun"; "" if it is not one of several.

    A SLURM batch script also has SLURM_PROCID, but no step: a process that it starts without srun is not one of
    several.
    """
    if "GOSSAMER_GENERATION" in environ and "RANK" in environ:
        return "gossamer"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    if any(name in environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK")):
        return "mpirun"
    if "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_JOB_ID" not in environ):
        return "srun"
    return ""


def is_rank_of_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun, srun or mpirun started this process as a rank of a run (`environ` None: os.environ)."""
    return launcher_of(os.environ if environ is None else environ) in ("torchrun", "srun", "mpirun")


def read_environment(environ: Mapping[str, str] | None = None) -> LauncherRank:
    """Return the rank and addresses of this process from `environ` (None: os.environ).

    Raises BadInput naming the variable that is missing or not a number.
    """
    env = _Variables(os.environ if environ is None else environ)
    launcher = launcher_of(env.all)
    if not launcher:
        raise BadInput(
            "wanted the variables of a launcher, got none (RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK are not set): "
            "start with gossamer, torchrun, srun or mpirun"
        )
    place = {"gossamer": _torchrun, "torchrun": _torchrun, "srun": _srun, "mpirun": _mpirun}[launcher](env)
    for small, name, large in (
        (place.rank, "rank", place.ranks),
        (place.local_rank, "local rank", place.local_ranks),
        (place.host, "host", place.hosts),
    ):
        if not 0 <= small < large:
            raise BadInput(
                f"{launcher}: wanted 0 <= {name} < {large}, got {small}: unset the other launcher's variables"
            )
    return place


class _Variables:
    """Environment variables, with errors that name them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.all = environ

    def text(self, *names: str) -> str:
        for name in names:
            if self.all.get(name):
                return self.all[name]
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise BadInput(f"environment variable {names[0]}{others} is not set: set it, or use a launcher that sets it")

    def number(self, *names: str) -> int:
        text = self.text(*names)
        name = next(n for n in names if self.all.get(n))
        if not re.fullmatch(r"\d+", text):
            raise BadInput(f"environment variable {name}: wanted a whole number, got {text!r}")
        return int(text)

    def number_or(self, name: str, default: int) -> int:
        return self.number(name) if self.all.get(name) else default

    def seconds(self, name: str, default: float) -> float:
        try:
            return float(self.all.get(name, default))
        except ValueError:
            raise BadInput(f"environment variable {name}: wanted seconds, got {self.all[name]!r}") from None

    def port(self, job: str) -> int:
        """MASTER_PORT, else a port that all ranks derive from the name of their `job`."""
        if "MASTER_PORT" in self.all or not job:
            return self.number("MASTER_PORT")
        return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _torchrun(env: _Variables) -> LauncherRank:
    rank, ranks = env.number("RANK"), env.number("WORLD_SIZE")
    if env.all.get("LOCAL_RANK") or env.all.get("LOCAL_WORLD_SIZE"):  # one alone does not say who is where
        local_rank, local_ranks = env.number("LOCAL_RANK"), env.number("LOCAL_WORLD_SIZE")
    else:  # set by hand, as for torch's own "env://": all ranks are taken to be on one host
        local_rank, local_ranks = rank, ranks
    if "GOSSAMER_NODE_RANK" in env.all:
        host, hosts = env.number("GOSSAMER_NODE_RANK"), env.number("GOSSAMER_NNODES")
    else:
        host = env.number_or("GROUP_RANK", rank // max(1, local_ranks))
        hosts = env.number_or("GROUP_WORLD_SIZE", -(-ranks // max(1, local_ranks)))
    return LauncherRank(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        host=host,
        hosts=hosts,
        hostname=socket.gethostname(),
        launcher=launcher_of(env.all),
        master=MasterAddress(
            host=env.text("MASTER_ADDR"),
            port=env.number("MASTER_PORT"),
            listener=env.number_or("GOSSAMER_LISTENER", -1),
            has_store=env.all.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        ),
        supervisor=_supervisor(env),
        start=StartAgreement(
            generation=env.number_or("GOSSAMER_GENERATION", env.number_or("TORCHELASTIC_RESTART_COUNT", 0)),
            resume_step=env.number_or("GOSSAMER_RESUME_STEP", -1),
            shared=env.all.get("GOSSAMER_SHARED", "1") == "1",
        ),
    )


def _supervisor(env: _Variables) -> SupervisorLink:
    return SupervisorLink(
        heartbeat=env.all.get("GOSSAMER_HEARTBEAT", ""),
        token=env.all.get("GOSSAMER_TOKEN", ""),
        heartbeat_s=env.seconds("GOSSAMER_HEARTBEAT_S", 5.0),
        box=env.number_or("GOSSAMER_BOX", -1),
        errors=env.all.get("GOSSAMER_ERRORS", ""),
    )


def _srun(env: _Variables) -> LauncherRank:
    ranks = env.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    hosts = expand_hosts(env.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))
    per_host = env.all.get("SLURM_STEP_TASKS_PER_NODE") or env.all.get("SLURM_TASKS_PER_NODE") or ""
    counts = expand_counts(per_host)
    host = env.number("SLURM_NODEID") if "SLURM_NODEID" in env.all else env.number("SLURM_PROCID") * len(hosts) // ranks
    job = f"{env.all.get('SLURM_JOB_ID', '')}.{env.all.get('SLURM_STEP_ID', '')}"
    return LauncherRank(
        rank=env.number("SLURM_PROCID"),
        ranks=ranks,
        local_rank=env.number("SLURM_LOCALID"),
        local_ranks=counts[host] if host < len(counts) else -(-ranks // len(hosts)),
        host=host,
        hosts=len(hosts),
        hostname=socket.gethostname(),
        launcher="srun",
        master=MasterAddress(host=env.all.get("MASTER_ADDR") or hosts[0], port=env.port(job.strip("."))),
    )


def _mpirun(env: _Variables) -> LauncherRank:
    rank = env.number("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    ranks = env.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_ranks = env.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    is_one_host = local_ranks == ranks
    job = env.all.get("PMIX_NAMESPACE") or env.all.get("OMPI_MCA_ess_base_jobid") or env.all.get("PMI_JOBID") or ""
    return LauncherRank(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        host=rank // max(1, local_ranks),  # mpirun fills host after host unless told otherwise
        hosts=-(-ranks // max(1, local_ranks)),
        hostname=socket.gethostname(),
        launcher="mpirun",
        master=MasterAddress(
            host="127.0.0.1" if is_one_host and "MASTER_ADDR" not in env.all else env.text("MASTER_ADDR"),
            port=env.port(job),
        ),
    )


def expand_counts(written: str) -> list[int]:
    """Parse SLURM's tasks per node: "2(x3),1" gives [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", written):
        counts += [int(count)] * int(times or 1)
    return counts


def expand_hosts(written: str) -> list[str]:
    """Parse SLURM's host list: "gpu[01-03,7],login1" gives ["gpu01", "gpu02", "gpu03", "gpu7", "login1"].

    `scontrol` expands names that this parser cannot; raises BadInput when it fails too.
    """
    hosts = [host for part in _split(written) for host in _expand(part)]
    if hosts and not any("[" in host or "]" in host for host in hosts):
        return hosts
    try:
        shown = subprocess.run(["scontrol", "show", "hostnames", written], capture_output=True, text=True, check=False)
    except OSError:
        shown = None
    if shown is None or not shown.stdout.split():
        raise BadInput(f"environment variable SLURM_NODELIST: cannot read the host list {written!r}: set MASTER_ADDR")
    return shown.stdout.split()


def _split(written: str) -> list[str]:
    """At the commas outside brackets."""
    return [part for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", written.strip()) if part]


def _expand(part: str) -> list[str]:
    """The hosts of one name with any number of [..] in it."""
    match = re.search(r"\[([0-9,\-]+)\]", part)
    if match is None:
        return [part]
    names: list[str] = []
    for piece in match.group(1).split(","):
        low, _, high = piece.partition("-")
        for number in range(int(low), int(high or low) + 1):
            names += _expand(f"{part[: match.start()]}{number:0{len(low)}d}{part[match.end() :]}")
    return names
