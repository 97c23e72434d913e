"""One host of a laboratory that measures its links: RANK RANKS ADDRESS -> JSON, a line of it for all pairs of ranks and
a line for groups of two hosts, as many more hosts are measured.
"""

import os
import sys
from datetime import timedelta

rank, ranks, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["OMP_NUM_THREADS"] = "1"

import torch.distributed as dist  # noqa: E402

from gossamer.comm import island_search, link_probe  # noqa: E402
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous  # noqa: E402
from gossamer.comm.link_probe import probe  # noqa: E402
from gossamer.comm.message import ProcessGroups  # noqa: E402

store = dist.TCPStore(address, 29400, ranks, is_master=rank == 0, timeout=timedelta(seconds=60))
interface = "eth0"  # every host's end of its link
channel = ProcessGroupChannel(Rendezvous(store, rank, ProcessGroups.flat(ranks), interface=interface, timeout_s=60.0))
print(probe(channel).model_dump_json())
island_search.PAIRS = link_probe.PAIRS = 2
print(probe(channel, hosts=[(r,) for r in range(ranks)]).model_dump_json())
channel.close()
