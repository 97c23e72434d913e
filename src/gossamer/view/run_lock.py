"""The lock of a run directory: one process trains in it, and a second one gets an error that names the holder.

The lock is the system's own (`flock` on RUN/.lock), so that it is freed when its holder ends, in any way. Where a file
system has none, it is a file that its holder touches (RUN/.lock.beat). One left untouched for three periods expires.
The file names the holder, for the message.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gossamer.spec.errors import BadInput, bad_input

try:
    import fcntl
except ImportError:  # not POSIX: the beating file
    fcntl = None  # type: ignore[assignment]

BEAT_S = 5.0
_PERIODS = 3
_SILENT_S = 600.0
_CLOCKS_S = 5.0  # by which the time of boot and the clock may disagree
_SETTLE_S = 0.3  # for two that take over one dead holder's file at once to see whose name it bears
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds the lock of a run directory. `since_s`: seconds since the epoch, of the holder's clock."""

    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    since_s: float = field(default_factory=time.time)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def told(self) -> str:
        """Return the holder as text: "process 4711 on host a since 17:45" (with the date, if not today)."""
        since, now = time.localtime(self.since_s), time.localtime()
        form = "%H:%M" if since[:3] == now[:3] else "%Y-%m-%d %H:%M"
        return f"process {self.process} on host {self.host} since {time.strftime(form, since)}"


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, made where it is missing, inside the `with` block.

    Raises BadInput, at once, where another process trains in it, or where it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        release = _locked(directory) or _beating(directory)
    except OSError as error:
        raise bad_input(
            wanted=f"to write in the run directory {directory}",
            got=error.strerror or str(error),
            do="name a run directory that can be written",
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):
            release()


def check_free(directory: Path) -> None:
    """Raise BadInput where another process trains in the run directory; holds nothing afterwards."""
    with held(directory):
        pass


def holder_of(directory: Path) -> Holder | None:
    """Return the process that trains in the run directory, as far as files tell; None: nobody. Takes no lock.

    A holder on another host, whose processes cannot be seen from here, counts until its records have been silent for
    ten minutes.
    """
    holder = _read(directory / ".lock") or _read(directory / ".lock.beat")
    if holder is None:
        return None
    if holder.host == socket.gethostname():
        return holder if _lives(holder.process, since_s=holder.since_s) else None
    try:
        silent_s = time.time() - (directory / "records.jsonl").stat().st_mtime
    except OSError:
        silent_s = time.time() - holder.since_s
    return holder if silent_s < _SILENT_S else None


def _lives(process: int, *, since_s: float) -> bool:
    """Return whether the process is there, and did not begin after the lock was taken: numbers are given anew."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text("utf-8").splitlines()
        boot_s = float(next(line.split()[1] for line in lines if line.startswith("btime ")))
    except (OSError, ValueError, IndexError, StopIteration):
        return True
    return boot_s + ticks / os.sysconf("SC_CLK_TCK") <= since_s + _CLOCKS_S


def _refusal(directory: Path, holder: Holder | None) -> BadInput:
    who = holder.told() if holder is not None else "another process"
    return BadInput(
        f"{directory} is being trained by {who}: nothing was changed. Wait for its end, or stop it "
        "(Ctrl-C or SIGTERM, and it saves a checkpoint), then try again"
    )


def _read(file: Path) -> Holder | None:
    try:
        said = json.loads(file.read_text("utf-8"))
        return Holder(
            host=str(said["host"]),
            process=int(said["process"]),
            since_s=float(said["since_s"]),
            token=str(said["token"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _line(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode() + b"\n"


def _locked(directory: Path) -> Callable[[], None] | None:
    """Take the system's lock; return the function that frees it, or None where the file system has no locks."""
    if fcntl is None:
        return None
    file = directory / ".lock"
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                return None
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise _refusal(directory, _read(file)) from None
            raise
        if _is_at(file, descriptor):
            break
        os.close(descriptor)  # of a holder that took the file away as it left
    with suppress(OSError):  # a full disk: it is held all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _line(Holder()), 0)

    def release() -> None:
        file.unlink(missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        os.close(descriptor)

    return release


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _beating(directory: Path) -> Callable[[], None]:
    """Take the lock file that its holder touches; return the function that frees it."""
    file, mine = directory / ".lock.beat", Holder()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.write(descriptor, _line(mine))
        os.close(descriptor)
    except FileExistsError:
        _take_over(directory, file, mine)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):
                if (holder := _read(file)) is not None and holder.token == mine.token:
                    os.utime(file)

    thread = threading.Thread(target=beat, name="gossamer-lock", daemon=True)
    thread.start()

    def release() -> None:
        over.set()
        thread.join()
        if (holder := _read(file)) is not None and holder.token == mine.token:
            file.unlink(missing_ok=True)

    return release


def _take_over(directory: Path, file: Path, mine: Holder) -> None:
    """Write our name into the lock file of a dead holder. Raises BadInput where it lives, or another was first."""
    holder = _read(file)
    beside = file.with_name(f".lock.{mine.token}")
    beside.write_bytes(_line(mine))
    try:
        if not _is_gone(holder, age_s=_age_s(file, beside)):
            raise _refusal(directory, holder)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
    time.sleep(_SETTLE_S)
    found = _read(file)
    if found is None or found.token != mine.token:
        raise _refusal(directory, found)


def _age_s(file: Path, beside: Path) -> float:
    """Return the seconds since the last heartbeat by the clock of the file system: those of hosts may differ."""
    try:
        return beside.stat().st_mtime - file.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _is_gone(holder: Holder | None, *, age_s: float) -> bool:
    if age_s > _PERIODS * BEAT_S:
        return True
    if holder is None or holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
