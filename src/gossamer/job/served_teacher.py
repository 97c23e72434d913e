"""A teacher for students on other hosts (`gossamer teach`): found as a run finds its own, and served until stopped."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gossamer.job.teaching import digest_of, facts_of, find_teacher
from gossamer.launch.environment import TEACHER_TOKEN
from gossamer.launch.port import listen, parse_address
from gossamer.run.remote_teacher.server import ServedTeacher, TeacherServer
from gossamer.spec.errors import bad_input


def serve_teacher(
    teacher: str, address: str, *, token: str = "", clients: int = 64, tell: Callable[[str], None] = lambda said: None
) -> dict[str, Any]:
    """Serve a teacher on HOST:PORT until Ctrl-C or SIGTERM; return what was done.

    token: the shared secret, "" for that of GOSSAMER_TEACHER_TOKEN. Raises BadInput.
    """
    host, port = parse_address(address, key="--listen")
    secret = token or os.environ.get(TEACHER_TOKEN, "")
    if not secret and not _is_here(host):
        raise bad_input(
            wanted=f"a secret, as {host} can be reached from other hosts",
            got="none",
            do=f"set {TEACHER_TOKEN} here and where the student's ranks are, to the same text",
            key="--listen",
        )
    if clients < 1:
        raise bad_input(wanted="1 or more students at a time", got=str(clients), do="give how many", key="--clients")
    listener = listen(host, port)  # a port in use is known before minutes of loading
    with listener, _terminable():
        served = None
        try:
            tell(f"loads {teacher}")
            found = find_teacher(teacher)
            facts = facts_of(found, digest_of(found.module))
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            served = TeacherServer(
                teacher=ServedTeacher(found.module, facts, device),
                listener=listener,
                token=secret,
                clients=clients,
                tell=tell,
            )
            tell(f"{facts.parameters:,} parameters, {facts.digest}, at tcp://{host}:{port}; Ctrl-C ends it")
            served.serve()
        except KeyboardInterrupt:
            if served is None:
                raise
        done = served.done
    return {
        "teacher": teacher,
        "address": f"tcp://{host}:{port}",
        "students": done.students,
        "questions": done.questions,
        "tokens": done.tokens,
        "sent_bytes": done.sent_bytes,
    }


def _is_here(host: str) -> bool:
    """Return whether only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the main thread as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
