"""The delay line of one host, a process of its own: it holds packets for the one-way delay of the link.

Run by path, with the standard library alone: delay.py LINE DEVICE DELAY_S. It makes the TUN device LINE, and sends the
packets that the host writes there through DEVICE after DELAY_S. The bandwidth is shaped on LINE, so packets arrive here
already shaped, as on a real link: first serialization, then propagation. Packets keep the kernel's large-segment
headers (virtio_net_hdr) on both sides, so one read moves up to 64 KiB. It runs until killed, by its owner or by the
cleanup process.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_ETHERNET_BYTES = 14
_IPV4 = b"\x08\x00"
_HEADER = struct.Struct("=BBHHHH")  # virtio_net_hdr: flags, kind, header length, segment size, checksum start, offset


def open_line(name: str) -> int:
    """Create a TUN device whose packets carry a virtio_net_hdr; return its file descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tun


def open_device(name: str) -> socket.socket:
    """Return a socket that sends whole frames through `name` and receives nothing."""
    out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    out.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    out.bind((name, 0))
    out.setblocking(False)
    return out


def ethernet_frame(packet: bytes, own: bytes) -> bytes | None:
    """Return the Ethernet frame for a packet read from the line, None for a packet that is not IPv4."""
    flags, kind, header, segment, start, offset = _HEADER.unpack_from(packet)
    body = packet[_HEADER.size :]
    if body[0] >> 4 != 4:
        return None
    target = own[:5] + body[19:20]  # hosts are numbered alike in both addresses
    needs_sum = flags & 1
    shifted = _HEADER.pack(
        flags,
        kind,
        header + _ETHERNET_BYTES if header else 0,
        segment,
        start + _ETHERNET_BYTES if needs_sum else 0,
        offset,
    )
    return shifted + target + own + _IPV4 + body


def relay(line: int, out: socket.socket, delay_s: float) -> None:
    """Move packets from the line to the device after `delay_s`, until the line is removed."""
    own = out.getsockname()[4]
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([line], [], [], left)
        if readable:
            _take(line, waiting, own, delay_s)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _send(out, waiting.popleft()[1])


def _take(line: int, waiting: deque[tuple[float, bytes]], own: bytes, delay_s: float) -> None:
    due = time.monotonic() + delay_s
    for _ in range(64):  # then look at what is due
        try:
            packet = os.read(line, 65550 + _HEADER.size)
        except BlockingIOError:
            return
        frame = ethernet_frame(packet, own)
        if frame is not None:
            waiting.append((due, frame))


def _send(out: socket.socket, frame: bytes) -> None:
    try:
        out.send(frame)
    except OSError:
        return  # a full or downed device loses packets, as links do


def main() -> None:
    """Serve the delay line of one host until killed."""
    name, device, delay_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    line, out = open_line(name), open_device(device)
    os.setpriority(os.PRIO_PROCESS, 0, -15)  # a link's delay does not depend on the processors that hosts share
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(line, out, delay_s)


if __name__ == "__main__":
    main()
