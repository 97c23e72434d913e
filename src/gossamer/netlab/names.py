"""Names of the devices and namespaces of one emulated network, and the addresses of its hosts."""

from __future__ import annotations

from dataclasses import dataclass

MASTER_PORT = 29500
MEET_PORT = 29400
DEVICE = "eth0"  # every host's end of its link
LINE = "line0"  # where packets enter the delay line


@dataclass(frozen=True, slots=True)
class LabNames:
    """The names made from the network's own prefix: only network namespaces are visible outside of it."""

    prefix: str

    @property
    def switch(self) -> str:
        """The namespace of the bridges and of the far end of every link."""
        return f"{self.prefix}sw"

    def host(self, host: int) -> str:
        """Return the namespace of one host."""
        return f"{self.prefix}h{host}"

    def path(self, host: int) -> str:
        """Return the file that stands for a host's namespace."""
        return f"/run/netns/{self.host(host)}"


def address(host: int) -> str:
    """Return a host's IPv4 address. Every emulated network has its own namespaces, so all use the same addresses."""
    return f"10.77.0.{host + 1}"


def hardware_address(host: int) -> str:
    """Return a host's link address: fixed, so that no address resolution is sent."""
    return f"02:67:73:6d:00:{host + 1:02x}"


def port(host: int) -> str:
    """Return the bridge's end of a host's link."""
    return f"h{host}"


def bridge(island: int) -> str:
    """Return the bridge of one island."""
    return f"island{island}"


def uplink(island: int) -> str:
    """Return the island's end of its link to the core."""
    return f"up{island}"


def downlink(island: int) -> str:
    """Return the core's end of an island's link."""
    return f"down{island}"


CORE = "core"
