"""What one host runs for a peer: `python -m links.host METHOD MODEL STEPS WARM`; its last line is one JSON object.

With three arguments more, those of `links.turns`, it takes turns with other programs.

A round is the loop a careful user would write around the peer: fused AdamW, clipping, one loss.item() a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

import torch

from links import peers, setting
from links.turns import Turns
from peak import resident_peak_bytes


def main() -> None:
    name, model, steps, warm = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    peer = peers.start(name, setting.module(model))
    turns = Turns.of_host(sys.argv[5], sys.argv[6], int(sys.argv[7])) if len(sys.argv) > 5 else None
    times, losses, sent = [], [], 0
    for step in range(warm + steps):
        if step == warm:
            sent = interface_bytes()
        if turns is not None:
            turns.wait()
        batch = setting.rows_of(step, rank, hosts)
        began = time.perf_counter()
        losses.append(peer.step(batch))
        times.append(time.perf_counter() - began)
    sent = interface_bytes() - sent
    said = {
        "step_s": median(times[warm:]),
        "steps_s": [round(t, 4) for t in times[warm:]],
        "wire_bytes": sent / steps,
        "peak_bytes": resident_peak_bytes(),
        "loss": losses[-1],
        "version": peer.version,
    }
    print("\n" + json.dumps(said), flush=True)
    peer.finish()


def interface_bytes() -> int:
    """What this host has sent so far, as the kernel counts it (0.1 to 0.3% above the payload)."""
    with open("/proc/net/dev") as table:
        return sum(int(line.split(":")[1].split()[8]) for line in table if line.strip().startswith("eth0:"))


if __name__ == "__main__":
    main()
