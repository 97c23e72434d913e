"""Processes of one machine: start and reap workers, monitor their heartbeats, read their error reports.

Nothing here imports torch: a supervisor must start at once, stay small, and outlive its workers. One `EventLoop` serves
every socket and pipe of a supervisor, without threads. A worker has one thread, its `Heartbeat`.
"""

from gossamer.process.error_reports import ErrorReport, read_error, write_error
from gossamer.process.event_loop import EventLoop
from gossamer.process.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED, ORPHANED, PEER_LOST, exit_text
from gossamer.process.heartbeat import Heartbeat
from gossamer.process.heartbeat_server import HeartbeatServer
from gossamer.process.last_position import Position
from gossamer.process.liveness import Liveness, left_standing, stalled
from gossamer.process.orphan_reaper import OrphanReaper
from gossamer.process.spawn import Worker
from gossamer.process.starter import Command, Starter, starter_of
from gossamer.process.template import tied

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
    "Command",
    "EventLoop",
    "Liveness",
    "OrphanReaper",
    "Position",
    "Starter",
    "Worker",
    "exit_text",
    "read_error",
    "stalled",
    "starter_of",
    "left_standing",
    "tied",
    "write_error",
]
