"""Launch workers on this host, on hosts that rendezvous, or over ssh; supervise them and report the root cause.

Nothing here imports torch. `launch_local` serves one machine. `launch_met` is for several hosts on which the same
command was started; `launch_hosts` starts it on all of them over ssh, `launch_ray` on nodes of a Ray cluster.
`read_environment` returns a worker's rank and addresses whatever launched it; `run_worker` wraps a worker's main
function.
"""

from gossamer.launch.environment import LauncherRank, launcher_of, read_environment
from gossamer.launch.launch_rendezvous import launch_met
from gossamer.launch.local import LaunchRequest, launch_here, launch_local
from gossamer.launch.ray_cluster import launch_ray
from gossamer.launch.rendezvous_config import HostMeeting, RendezvousConfig
from gossamer.launch.rendezvous_messages import HostFingerprint
from gossamer.launch.ssh import launch_hosts
from gossamer.launch.supervisor import RunEnd
from gossamer.launch.worker import Ready, run_worker
from gossamer.launch.worker_group import Limits

__all__ = [
    "HostFingerprint",
    "RendezvousConfig",
    "Limits",
    "HostMeeting",
    "RunEnd",
    "LauncherRank",
    "Ready",
    "LaunchRequest",
    "launch_here",
    "launch_hosts",
    "launch_local",
    "launch_met",
    "launch_ray",
    "launcher_of",
    "read_environment",
    "run_worker",
]
