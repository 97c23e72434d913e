"""Read the kernel's byte counters at the bridge's end of every link: after shaping, before the next host."""

from __future__ import annotations

import re
from typing import TypeAlias

from gossamer.netlab.names import port, uplink
from gossamer.netlab.tools import read_json, tool
from gossamer.netlab.topology import LabTopology
from gossamer.netlab.traffic_shaping import peer_of

# tc cannot say classes in JSON: "class htb 1:10 parent 1:1 ...\n Sent 12 bytes 1 pkt ..."
_CLASS = re.compile(r"^class htb (\S+) .*\n Sent (\d+) bytes", re.MULTILINE)

ByteCounts: TypeAlias = tuple[int, int]  # (tx_bytes, rx_bytes)


def read_links(switch: str, topology: LabTopology) -> dict[str, ByteCounts]:
    """Return (tx_bytes, rx_bytes) per link since it was made.

    "h0" is the link as host 0 sees it, "island0" the uplink as island 0 sees it (with several islands only).
    """
    found = {entry["ifname"]: entry["stats64"] for entry in read_json("ip", "-n", switch, "-s", "-j", "link", "show")}
    count = {name: (int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])) for name, stats in found.items()}
    hosts = {f"h{h}": count[port(h)][::-1] for h in range(topology.hosts)}  # what the bridge receives, a host sent
    islands = {f"island{k}": count[uplink(k)] for k in range(len(topology.sizes()))}
    return {**hosts, **islands} if topology.has_uplinks else hosts


def read_pairs(switch: str, topology: LabTopology) -> dict[tuple[int, int], int]:
    """Return the bytes delivered per (source, target)."""
    pairs: dict[tuple[int, int], int] = {}
    for target in range(topology.hosts):
        for handle, count in _CLASS.findall(tool("tc", "-n", switch, "-s", "class", "show", "dev", port(target))):
            source = peer_of(handle)
            if source is not None:
                pairs[source, target] = int(count)
    return pairs
