"""Point-to-point transfers and expert all-to-all: messages other than gradients, each with its autograd.

They carry tensors between two ranks (pipeline activations, and their gradients back) and rows between all of them
(tokens to experts, unevenly), exact or through codecs.

A pipeline makes one `StageLink` per boundary tensor and pair of ranks, and one `TensorRoute` per micro-batch on each
side. Per step it makes one list of jobs for the communication thread, in the order of the rank's own action list:

    transfers = comm_thread.transfers(len(jobs))           # before the step; job j: the j-th SEND or RECV
    SEND_F: transfers.submit(j, route.send(y))             # encoded by the communication thread, during compute
    RECV_F: transfers.submit(j, route.receive());            x = transfers.result(j).mean    # a leaf
    SEND_B: transfers.submit(j, route.send_gradient(x.grad))
    RECV_B: transfers.submit(j, route.receive_gradient());   y.backward(transfers.result(j).mean)
    transfers.finish()                                     # after the step; raises PeerLost where a transfer hung

Receives are submitted as soon as the step begins: they wait for their turn, not for data. `link.traffic` returns the
size of every message before the step; `route.through` does both sides in one process. Experts give `RowAllToAll` a
function that runs a job at once, `partial(carry, channel)` of their own channel, and call it like a layer.
"""

from gossamer.p2p.activation import ActivationCodec, TensorSpec
from gossamer.p2p.expert_all_to_all import Carry, RowAllToAll, RowSplits
from gossamer.p2p.stage_link import StageLink, TensorRoute

__all__ = ["Carry", "ActivationCodec", "TensorSpec", "StageLink", "TensorRoute", "RowAllToAll", "RowSplits"]
