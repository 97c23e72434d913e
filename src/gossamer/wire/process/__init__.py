"""Processes of one machine: spawn and reap them, hear their hearts beat, read what they left behind.

Nothing here imports torch: a supervisor must start at once, stay small, and outlive whatever its workers do.
One `Loop` serves every socket and pipe of a supervisor; there is no thread on that side. A worker has one thread,
its `Heartbeat`.
"""

from gossamer.wire.process.codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, ORPHANED, PEER_LOST, exit_text
from gossamer.wire.process.heartbeat import Heartbeat
from gossamer.wire.process.listen import HeartbeatServer
from gossamer.wire.process.loop import Loop
from gossamer.wire.process.pulse import Pulse, left_standing, stalled
from gossamer.wire.process.reports import ErrorReport, read_error, write_error
from gossamer.wire.process.spawn import Job, Worker, tied
from gossamer.wire.process.warden import Warden

__all__ = [
    "BAD_INPUT",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "ORPHANED",
    "PEER_LOST",
    "ErrorReport",
    "Heartbeat",
    "HeartbeatServer",
    "Job",
    "Loop",
    "Pulse",
    "Warden",
    "Worker",
    "exit_text",
    "read_error",
    "stalled",
    "left_standing",
    "tied",
    "write_error",
]
