"""Launching: start workers here, on hosts that meet, or over ssh; see them through; say who failed first and why.

Nothing here imports torch. `launch_local` serves one machine, `launch_met` one of several hosts on which the same
command was started, `launch_hosts` starts it on all of them over ssh. `read_environment` tells a worker its place,
whoever launched it; `run_worker` wraps a worker's main.
"""

from gossamer.run.launch.crew import Limits
from gossamer.run.launch.environment import Place, launcher_of, read_environment
from gossamer.run.launch.greetings import Facts
from gossamer.run.launch.invitation import Invitation, Meeting
from gossamer.run.launch.local import Start, launch_here, launch_local
from gossamer.run.launch.met import launch_met
from gossamer.run.launch.ssh import launch_hosts
from gossamer.run.launch.supervise import Outcome
from gossamer.run.launch.worker import Ready, run_worker

__all__ = [
    "Facts",
    "Invitation",
    "Limits",
    "Meeting",
    "Outcome",
    "Place",
    "Ready",
    "Start",
    "launch_here",
    "launch_hosts",
    "launch_local",
    "launch_met",
    "launcher_of",
    "read_environment",
    "run_worker",
]
