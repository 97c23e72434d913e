"""How the parts of one laboratory are called, and the addresses its hosts have."""

from __future__ import annotations

from dataclasses import dataclass

MASTER_PORT = 29500
MEET_PORT = 29400
DEVICE = "eth0"  # every host's end of its link
LINE = "line0"  # where packets enter the delay line


@dataclass(frozen=True, slots=True)
class LabNames:
    """Names made from the laboratory's own prefix: only network namespaces are visible outside of it."""

    prefix: str

    @property
    def switch(self) -> str:
        """The namespace that holds the bridges and the far end of every link."""
        return f"{self.prefix}sw"

    def host(self, host: int) -> str:
        """The namespace of one host."""
        return f"{self.prefix}h{host}"

    def path(self, host: int) -> str:
        """The file that stands for a host's namespace."""
        return f"/run/netns/{self.host(host)}"


def address(host: int) -> str:
    """A host's IPv4 address. Every laboratory has its own namespaces, so all of them use the same ones."""
    return f"10.77.0.{host + 1}"


def hardware_address(host: int) -> str:
    """A host's link address: fixed, so that nothing has to be asked for on the wire."""
    return f"02:67:73:6d:00:{host + 1:02x}"


def port(host: int) -> str:
    """The bridge's end of a host's link."""
    return f"h{host}"


def bridge(island: int) -> str:
    """The bridge of one island."""
    return f"island{island}"


def uplink(island: int) -> str:
    """The island's end of its link to the core."""
    return f"up{island}"


def downlink(island: int) -> str:
    """The core's end of that link."""
    return f"down{island}"


CORE = "core"
