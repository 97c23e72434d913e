"""Transfers: messages other than gradients. Tensors between two ranks (pipeline activations, and their gradients
back) and rows between all of them (tokens to experts, unevenly), exact or through the codecs, each with its autograd.

How a pipeline uses it. Per boundary tensor and pair of ranks one `StageLink`, per micro-batch one `TensorRoute` on each
side, and per step one list of jobs for the pump, in the order of the rank's own action list:
    transfers = pump.transfers(len(jobs))                  # before the step; job j: the j-th SEND or RECV
    SEND_F: transfers.submit(j, passage.send(y))           # encoded by the pump, beside what is computed next
    RECV_F: transfers.submit(j, passage.receive());          x = transfers.result(j).mean    # a leaf
    SEND_B: transfers.submit(j, passage.send_gradient(x.grad))
    RECV_B: transfers.submit(j, passage.receive_gradient()); y.backward(transfers.result(j).mean)
    transfers.finish()                                     # after the step; raises PeerLost where something got stuck
Receives are submitted as soon as the step begins: they wait for their turn, not for data. `link.traffic` prices every
one of them before the step; `passage.through` does both sides in one process. Experts hand `RowAllToAll` a way to run a
job at once, `partial(carry, channel)` of a channel of their own, and call it like a layer.
"""

from gossamer.p2p.activation import ActivationCodec, TensorSpec
from gossamer.p2p.expert_all_to_all import Carry, RowAllToAll, RowSplits
from gossamer.p2p.stage_link import StageLink, TensorRoute

__all__ = ["Carry", "ActivationCodec", "TensorSpec", "StageLink", "TensorRoute", "RowAllToAll", "RowSplits"]
