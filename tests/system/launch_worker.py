"""A small real worker for launching tests: steps with its peers over sockets, and misbehaves as told.

Arguments: seconds per step, number of steps, then what rank 1 does at step 2: none | raise | bad | exit | segv | kill
| stop | oom | sleep | leaveCODE | quit | child | stubborn (never stops when asked).
More arguments are ignored: a test marks its processes with them.
The exchange is a star over TCP on MASTER_PORT: one byte a step, by which the ranks agree to stop.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from gossamer.launch import Ready, run_worker
from gossamer.spec.errors import BadInput, Interrupted, PeerLost

TRICKY_RANK, TRICKY_STEP = 1, 2


class Star:
    def __init__(self, ready: Ready) -> None:
        place = ready.place
        self.is_hub = place.rank == 0
        if place.rank == 0:
            with socket.socket(fileno=place.master.listener) as server:
                self.peers = [server.accept()[0] for _ in range(place.ranks - 1)]
            return
        while True:
            try:
                self.peers = [socket.create_connection((place.master.host, place.master.port))]
                return
            except ConnectionRefusedError:
                time.sleep(0.02)

    def exchange(self, wish: bool) -> bool:
        """Whether any rank has the wish: rank 0 collects, then answers."""
        try:
            if self.is_hub:
                wish = sum(self.hear(peer) for peer in self.peers) > 0 or wish  # hears all of them
            for peer in self.peers:
                peer.sendall(b"1" if wish else b"0")
            return wish if self.is_hub else self.hear(self.peers[0])
        except OSError as error:
            raise PeerLost(str(error)) from None

    @staticmethod
    def hear(peer: socket.socket) -> bool:
        if not (data := peer.recv(1)):
            raise PeerLost("Connection closed by peer")
        return data == b"1"


def misbehave(how: str) -> None:
    if how == "raise":
        raise RuntimeError("the matrix is singular\nin row 17")
    if how == "bad":
        raise BadInput("wanted 8 sequences, got 3: use a longer corpus")
    if how == "exit":
        os._exit(9)
    if how.startswith("leave"):  # as if all were well: done, interrupted, or a peer lost
        os._exit(int(how.removeprefix("leave")))
    if how == "quit":
        sys.exit(0)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "oom":
        hoard = [b"x" * (1 << 20) for _ in range(4000)]
        raise RuntimeError(f"had {len(hoard)} MiB")
    if how == "sleep":
        time.sleep(600)
    if how == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *sys.argv[4:]])


def main(ready: Ready) -> None:
    step_s, steps, how = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    star = Star(ready)
    beat = ready.heartbeat
    for step in range(steps):
        beat.at(step=step, phase="compute", op="layer 3", sequence=2 * step)
        time.sleep(step_s)
        if ready.place.rank == TRICKY_RANK and step == TRICKY_STEP:
            misbehave(how)
        beat.at(phase="exchange", op="bucket 0", sequence=2 * step + 1)
        if star.exchange(ready.stop.is_set and how != "stubborn"):
            raise Interrupted("saved")
        if ready.place.rank == 0:
            sys.stdout.write(f"step {step}\n")


if __name__ == "__main__":
    sys.exit(run_worker(main))
