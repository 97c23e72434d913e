"""The line of an agreement among hosts that met: the connections to host 0, over which folders go, too."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from gossamer.launch.agreement import SEEN_S, WORD, Line, Word, appears
from gossamer.process.json_lines import LIMIT_BYTES, Said, read_line, write_line
from gossamer.spec.errors import BadInput, PeerLost, RunFailed, WireMismatch, bad_input
from gossamer.spec.units import show_bytes

_CHUNK_BYTES = 1 << 20
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a host that is gone: lost after 30 s
_TAKES_S = 600.0  # of a host that has no room for what is sent, as its disk is slow; it is lost after that
_FILES = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}")


class OfferedFile(Said):
    """A file of a folder: its plain name, its size, and its SHA-256 ("" where hosts share the folder)."""

    name: Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")]
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]


class FolderOffer(Said):
    """The files of a folder, which whoever lacks it gets."""

    files: Annotated[tuple[OfferedFile, ...], Field(max_length=_FILES)]


_OFFER: TypeAdapter[FolderOffer] = TypeAdapter(FolderOffer)


class _Connection:
    """Lines and bytes over one socket. `name`: of the other host, for messages."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket, self._name, self._rest = connection, name, b""
        connection.settimeout(None)  # preparing takes as long as it takes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, data: bytes) -> None:
        self._socket.settimeout(_TAKES_S)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from None
        self._socket.settimeout(None)

    def line(self) -> bytes:
        while b"\n" not in self._rest:
            if len(self._rest) > LIMIT_BYTES:
                raise WireMismatch(f"host {self._name} sent a line of more than {LIMIT_BYTES} bytes: it is no Gossamer")
            self._rest += self._read()
        found, _, self._rest = self._rest.partition(b"\n")
        return found

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes."""
        while size:
            if not self._rest:
                self._rest = self._read()
            found, self._rest = self._rest[:size], self._rest[size:]
            size -= len(found)
            yield found

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from None
        if not data:
            raise self._lost("it closed the connection")
        return data

    def _lost(self, why: str) -> PeerLost:
        return PeerLost(f"host {self._name} left between phases ({why}): see the message there")


@dataclass(slots=True)
class HostSockets(Line):
    """The connections of this host to host 0, or of host 0 to the others: `others`, by host, of `hostnames`.

    `shared`: whether all hosts see the same run directory. All hosts construct it at the same time.
    """

    others: Mapping[int, socket.socket]
    hostnames: Sequence[str]
    host: int
    shared: bool
    _lines: list[_Connection] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Wait until all hosts are past their meeting, whose reader would take what is said too early."""
        self._lines = [_Connection(one, self.hostnames[number]) for number, one in sorted(self.others.items())]
        if self.is_first:
            self.heard()
        else:
            self.tell(Word())

    @property
    def is_first(self) -> bool:
        return self.host == 0

    def tell(self, word: Word) -> None:
        lost: PeerLost | None = None
        for line in self._lines:
            try:
                line.send(write_line(word))
            except PeerLost as error:  # the others hear of it all the same
                lost = error
        if lost is not None and word.failure is None:
            raise lost

    def heard(self) -> list[Word]:
        return [read_line(line.line(), WORD) for line in self._lines]

    def give(self, folder: Path) -> BadInput | RunFailed | None:
        """Let all hosts have a folder of host 0, complete; return why this host has it not, None: it has.

        Where they share it they wait until they see it. All hosts must call it.
        """
        if not self.is_first:
            return self._take(folder)
        self._offer(folder)
        return None

    def _offer(self, folder: Path) -> None:
        offer = _offered(folder, is_digested=not self.shared)
        for line in self._lines:
            line.send(write_line(offer))
        for line in self._lines:
            if read_line(line.line(), WORD).text:
                for one in offer.files:
                    with (folder / one.name).open("rb") as file:
                        while data := file.read(_CHUNK_BYTES):
                            line.send(data)

    def _take(self, folder: Path) -> BadInput | RunFailed | None:
        (line,) = self._lines
        offer = read_line(line.line(), _OFFER)
        if self.shared:
            self.tell(Word())
            return None if appears(lambda: _has(folder, offer)) else _unseen(folder, self.hostnames[self.host])
        if _has(folder, offer):
            self.tell(Word())
            return None
        self.tell(Word(text="wanted"))
        return _received(line, folder, offer, self.hostnames[self.host])


def _offered(folder: Path, *, is_digested: bool) -> FolderOffer:
    files = _files(folder)
    for one in files:
        if not (one.is_file() and _NAME.fullmatch(one.name)):
            raise RunFailed(
                f"{one} does not go to other hosts: wanted files alone in a start folder, with names of letters, "
                "digits, '.', '_' and '-'. Move it away, and go on with the same command and --resume auto"
            )
    return FolderOffer(
        files=tuple(
            OfferedFile(name=one.name, bytes=one.stat().st_size, sha256=_digest(one) if is_digested else "")
            for one in files
        )
    )


def _files(folder: Path) -> list[Path]:
    """Return what a folder holds, without hidden files, which a file system may keep there."""
    return sorted(one for one in folder.iterdir() if not one.name.startswith(".")) if folder.is_dir() else []


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while data := content.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _has(folder: Path, offer: FolderOffer) -> bool:
    """Return whether a folder holds what is offered, and nothing else: a reader might take another file first."""
    if [one.name for one in _files(folder)] != sorted(one.name for one in offer.files):
        return False
    files = [(folder / one.name, one) for one in offer.files]
    return all(
        file.is_file() and file.stat().st_size == one.bytes and one.sha256 in ("", _digest(file)) for file, one in files
    )


def _unseen(folder: Path, hostname: str) -> BadInput:
    return bad_input(
        wanted=f"the start folder {folder} on host {hostname}, whose file system host 0 shares",
        got=f"none within {SEEN_S:.0f} s",
        do="mount it alike on all hosts, or set run.directory to a folder that they do not share",
        key="run.directory",
    )


def _received(line: _Connection, folder: Path, offer: FolderOffer, hostname: str) -> BadInput | RunFailed | None:
    """Write the folder that host 0 sends, complete or not at all; return why that was not possible."""
    partial = folder.with_name(f".{folder.name}.partial")
    problem: RunFailed | None = None
    try:
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            problem = _unwritten(folder, hostname, error)
        for one in offer.files:  # read to the end in any case: what host 0 says next comes after it
            wrong = _copied(line, partial / one.name, one, hostname, is_kept=problem is None)
            problem = problem or wrong
        if problem is None:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                partial.rename(folder)
            except OSError as error:
                problem = _unwritten(folder, hostname, error)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return problem


def _copied(line: _Connection, path: Path, one: OfferedFile, hostname: str, *, is_kept: bool) -> RunFailed | None:
    digest, problem = hashlib.sha256(), None
    descriptor = -1
    try:
        if is_kept:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        problem = _unwritten(path, hostname, error)
    for data in line.chunks(one.bytes):
        digest.update(data)
        if descriptor >= 0 and problem is None:
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
            except OSError as error:
                problem = _unwritten(path, hostname, error)
    if descriptor >= 0:
        with suppress(OSError):
            os.fsync(descriptor)
        os.close(descriptor)
    if problem is None and digest.hexdigest() != one.sha256:
        return RunFailed(f"{path.name} arrived on host {hostname} with other bytes than host 0 has: start again")
    return problem


def _unwritten(path: Path, hostname: str, error: OSError) -> RunFailed:
    free = next((show_bytes(shutil.disk_usage(one).free) for one in path.parents if one.is_dir()), "nothing")
    return RunFailed(
        f"{path} was not written on host {hostname}: {error.strerror or error} ({free} free): make room there, or name "
        "another run.directory, and go on with the same command and --resume auto"
    )
