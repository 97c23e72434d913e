"""The network laboratory: real hosts on one machine, with links as slow, as far and as unreliable as you say.

Hosts are network namespaces, links are veth pairs shaped by the kernel's htb in both directions, processors and memory
are held by cgroups, distance is a delay line. Linux and root only; `lab_unavailable()` says what is missing.
"""

from gossamer.wire.lab.change import Change
from gossamer.wire.lab.counters import Counted
from gossamer.wire.lab.laboratory import Lab
from gossamer.wire.lab.needs import lab_unavailable
from gossamer.wire.lab.remains import end, standing, sweep
from gossamer.wire.lab.topology import PairRate, Topology

__all__ = ["Change", "Counted", "Lab", "PairRate", "Topology", "end", "lab_unavailable", "standing", "sweep"]
