"""What the laboratory's tests run on its hosts (standard library only).

serve PORT TIMES | send ADDRESS PORT BYTES -> seconds | echo PORT | ping ADDRESS PORT -> least round trip in seconds
"""

import socket
import sys
import time
import zlib


def connect(address, port):
    while True:
        try:
            return socket.create_connection((address, port), timeout=60)
        except ConnectionRefusedError:
            time.sleep(0.01)


def serve(port, times):
    with socket.create_server(("", port)) as server:
        for _ in range(times):
            with server.accept()[0] as peer, peer.makefile("rb") as stream:
                wanted, checksum = (int(word) for word in stream.readline().split())
                peer.sendall(b"y" if zlib.crc32(stream.read(wanted)) == checksum else b"n")


def send(address, port, count):
    data = bytes(range(256)) * (count // 256)
    with connect(address, port) as peer:
        begun = time.monotonic()
        peer.sendall(b"%d %d\n" % (len(data), zlib.crc32(data)) + data)
        assert peer.recv(1) == b"y"
    print(time.monotonic() - begun)


def echo(port):
    with socket.create_server(("", port)) as server, server.accept()[0] as peer:
        while data := peer.recv(1):
            peer.sendall(data)


def ping(address, port):
    with connect(address, port) as peer:
        trips = []
        for _ in range(4):
            begun = time.monotonic()
            peer.sendall(b"x")
            peer.recv(1)
            trips.append(time.monotonic() - begun)
    print(min(trips))


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    globals()[name](*(word if "." in word else int(word) for word in rest))
