"""Network emulation on one machine: real hosts, with links of a given bandwidth, delay and reliability.

Hosts are network namespaces, links are veth pairs shaped by the kernel's htb in both directions, cgroups limit
processors and memory, and a delay line adds latency. Linux and root only; `lab_unavailable()` returns what is missing.
"""

from gossamer.netlab.cleanup import end, standing, sweep
from gossamer.netlab.counters import ByteCounts
from gossamer.netlab.link_events import LinkEvent
from gossamer.netlab.network import Lab
from gossamer.netlab.requirements import lab_unavailable
from gossamer.netlab.topology import LabTopology, PairRate

__all__ = ["LinkEvent", "ByteCounts", "Lab", "PairRate", "LabTopology", "end", "lab_unavailable", "standing", "sweep"]
