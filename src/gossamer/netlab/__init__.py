"""The network laboratory: real hosts on one machine, with links as slow, as far and as unreliable as you say.

Hosts are network namespaces, links are veth pairs shaped by the kernel's htb in both directions, processors and memory
are held by cgroups, distance is a delay line. Linux and root only; `lab_unavailable()` says what is missing.
"""

from gossamer.netlab.cleanup import end, standing, sweep
from gossamer.netlab.counters import ByteCounts
from gossamer.netlab.link_events import LinkEvent
from gossamer.netlab.network import Lab
from gossamer.netlab.requirements import lab_unavailable
from gossamer.netlab.topology import LabTopology, PairRate

__all__ = ["LinkEvent", "ByteCounts", "Lab", "PairRate", "LabTopology", "end", "lab_unavailable", "standing", "sweep"]
