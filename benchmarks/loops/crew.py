"""The processes of one trial, started as a launcher starts them: its variables, and a store that it keeps.

Processes are forked, so that what was imported is there; each is fresh, so that one trial leaves nothing to the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from loops.rank import Outcome, unpacked

HERE = "127.0.0.1"
ENDING_S = 20.0  # that a process may take to end when its loop has
_fork = multiprocessing.get_context("fork")


def torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **by_hand(rank, ranks, port),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


def by_hand(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {**four(rank, ranks, port), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}


def four(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What init_method="env://" asks for."""
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": HERE, "MASTER_PORT": str(port)}


def srun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NODELIST": HERE,
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(port),
    }


def mpirun(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(ranks),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks),
        "MASTER_PORT": str(port),
    }


LAUNCHERS = {one.__name__: one for one in (torchrun, by_hand, four, srun, mpirun)}


def as_launched(launcher: str) -> None:
    """Set what is the same for all processes; before gossamer is imported, as in a script."""
    for name in [n for n in os.environ if re.match("RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC|SLURM|OMPI|PMI", n)]:
        del os.environ[name]
    if launcher == "torchrun":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def alone(job: Callable[[], Outcome], limit_s: float) -> Outcome:
    """What came of the job in a process of its own, with no launcher."""
    return _together([{}], job, limit_s)[0]


def crew(job: Callable[[], Outcome], ranks: int, launcher: str, limit_s: float) -> list[Outcome]:
    """What came of the job on every rank."""
    with _port(kept=launcher == "torchrun") as port:
        return _together([LAUNCHERS[launcher](rank, ranks, port) for rank in range(ranks)], job, limit_s)


@contextlib.contextmanager
def _port(*, kept: bool) -> Iterator[int]:
    """A port, with a store behind it that a process of its own keeps, as torchrun's agent does; else a free one."""
    if not kept:
        with socket.socket() as free:
            free.bind((HERE, 0))
            port = free.getsockname()[1]
        yield port
        return
    ours, theirs = _fork.Pipe(duplex=False)
    agent = _fork.Process(target=_keep_store, args=(theirs,))
    agent.start()
    try:
        yield ours.recv()
    finally:
        agent.kill()
        agent.join()


def _keep_store(pipe: Connection) -> None:
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        time.sleep(60)


def _together(places: Sequence[dict[str, str]], job: Callable[[], Outcome], limit_s: float) -> list[Outcome]:
    until = time.monotonic() + limit_s
    with contextlib.ExitStack() as held:
        members = [held.enter_context(_started(place, job, limit_s)) for place in places]
        return [_outcome(*member, until) for member in members]


@contextlib.contextmanager
def _started(
    place: dict[str, str], job: Callable[[], Outcome], limit_s: float
) -> Iterator[tuple[Any, Connection, IO[str]]]:
    """(process, where its outcome comes from, what it has written to standard error)."""
    ours, theirs = _fork.Pipe(duplex=False)
    with ours, tempfile.TemporaryFile("w+") as words:
        process = _fork.Process(target=_member, args=(place, job, theirs, words, limit_s))
        process.start()
        theirs.close()
        try:
            yield process, ours, words
        finally:
            process.kill()
            process.join()


def _outcome(process: Any, pipe: Connection, words: IO[str], until: float) -> Outcome:
    if not wait([pipe], timeout=max(0.0, until - time.monotonic())):
        return Outcome(ending="hang", said=f"no end within the limit, at {_where(words)}")
    try:
        found = unpacked(pipe.recv_bytes())
    except EOFError:
        process.join()
        words.seek(0)
        return Outcome(ending="crash", said=f"its process ended with {process.exitcode}: {words.read()[-300:]}")
    process.join(ENDING_S)
    if process.exitcode is None:
        return Outcome(ending="hang", said=f"the loop {found.ending}, and its process does not end")
    return found


def _member(
    place: dict[str, str], job: Callable[[], Outcome], pipe: Connection, words: IO[str], limit_s: float
) -> None:
    os.dup2(words.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(place)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 1), file=words)
    try:
        pipe.send_bytes(job().packed())
    except BaseException:
        pipe.send_bytes(Outcome(ending="crash", said=traceback.format_exc()).packed())
    faulthandler.cancel_dump_traceback_later()


def _where(words: IO[str]) -> str:
    """Where the main thread is: the innermost four calls."""
    words.seek(0)
    threads = re.split(r"\n(?=Thread|Current thread)", words.read())
    calls = re.findall(r'File "(.*)", line (\d+) in (\S+)', threads[-1])
    return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in calls[:4]) or "an unknown place"
