"""Hosts as network namespaces, links as veth pairs, islands as bridges joined by a core bridge.

All bridges are in a namespace of their own, so that the machine's network (firewall, addresses, other bridges) does not
affect the emulated one. No addresses are learned or resolved: neighbor and forwarding entries are fixed, and IPv6 is
off, so every byte that the counters count is sent by the hosts.
"""

from __future__ import annotations

from gossamer.netlab.names import (
    CORE,
    DEVICE,
    LINE,
    LabNames,
    address,
    bridge,
    downlink,
    hardware_address,
    port,
    uplink,
)
from gossamer.netlab.tools import batch, tool
from gossamer.netlab.topology import LabTopology

_QUIET = "cd /proc/sys/net; for f in ipv6/conf/*/disable_ipv6; do [ ! -e $f ] || echo 1 >$f; done"
# No memory of earlier connections (a run must not depend on the one before), one congestion control everywhere: reno
# where the machine keeps cubic to itself.
_QUIET_HOST = (
    _QUIET
    + "; cd ipv4; echo 1 >tcp_no_metrics_save; echo 0 >conf/all/rp_filter; echo 0 >conf/default/rp_filter"
    + "; echo cubic >tcp_congestion_control || echo reno >tcp_congestion_control"
)


def wire(names: LabNames, topology: LabTopology) -> None:
    """Create namespaces, bridges, links and addresses; no rates yet."""
    everyone = range(topology.hosts)
    for namespace in [names.switch, *(names.host(h) for h in everyone)]:
        tool("ip", "netns", "add", namespace)
        quiet = _QUIET if namespace == names.switch else _QUIET_HOST
        tool("nsenter", f"--net=/run/netns/{namespace}", "sh", "-c", quiet)
    batch("ip", names.switch, _switch_lines(names, topology))
    batch("bridge", names.switch, _forwarding_lines(topology))
    for host in everyone:
        batch("ip", names.host(host), _host_lines(topology, host))


def lead_through_line(names: LabNames, topology: LabTopology, host: int) -> None:
    """Route all traffic of `host` into its delay line (whose process has created the device)."""
    gso_bytes = lump_bytes(topology.rate_bytes_per_s)
    batch(
        "ip",
        names.host(host),
        [
            f"link set dev {LINE} mtu 1500 gso_max_size {gso_bytes} txqueuelen 1000 up",
            f"route replace 10.77.0.0/24 dev {LINE} src {address(host)}",
        ],
    )


def lump_bytes(rate_bytes_per_s: float) -> int:
    """Return the largest segment that a host hands to its link, in bytes.

    It is 10 ms of the link's rate, between 16 and 64 KiB as headers and the kernel require.
    """
    return int(min(65536.0, max(16384.0, rate_bytes_per_s * 0.01)))


def _switch_lines(names: LabNames, topology: LabTopology) -> list[str]:
    lines = ["link set lo up", f"link add name {CORE} type bridge mcast_snooping 0", f"link set dev {CORE} up"]
    for island in range(len(topology.sizes())):
        lines += [
            f"link add name {bridge(island)} type bridge mcast_snooping 0",
            f"link add name {uplink(island)} type veth peer name {downlink(island)}",
            f"link set dev {uplink(island)} master {bridge(island)}",
            f"link set dev {downlink(island)} master {CORE}",
            *(f"link set dev {device} up" for device in (bridge(island), uplink(island), downlink(island))),
        ]
    for host in range(topology.hosts):
        lines += [
            f"link add name {port(host)} type veth peer name {DEVICE} netns {names.host(host)}",
            f"link set dev {port(host)} master {bridge(topology.island(host))} up",
        ]
    return lines


def _forwarding_lines(topology: LabTopology) -> list[str]:
    lines = []
    islands = range(len(topology.sizes()))
    ports = [port(h) for h in range(topology.hosts)] + [p(k) for k in islands for p in (uplink, downlink)]
    lines += [f"link set dev {device} learning off flood off mcast_flood off" for device in ports]
    for host in range(topology.hosts):
        home = topology.island(host)
        ways = [port(host), downlink(home), *(uplink(k) for k in islands if k != home)]
        lines += [f"fdb replace {hardware_address(host)} dev {way} master static" for way in ways]
    return lines


def _host_lines(topology: LabTopology, host: int) -> list[str]:
    lump = lump_bytes(topology.rate_bytes_per_s)
    return [
        "link set lo up",
        f"link set dev {DEVICE} address {hardware_address(host)} gso_max_size {lump} up",
        f"addr add {address(host)}/24 dev {DEVICE}",
        *(
            f"neigh replace {address(other)} lladdr {hardware_address(other)} dev {DEVICE} nud permanent"
            for other in range(topology.hosts)
            if other != host
        ),
    ]
