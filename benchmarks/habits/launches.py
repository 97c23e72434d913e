"""How a script is started, and what it has set up before wrap."""

from __future__ import annotations

import torch.distributed as dist

from loops.habit import habit
from loops.scene import batches, cross_entropy, net, ranks, sgd


def trained(wrap, seed=1):
    """The plain loop."""
    model = net(seed)
    model, optimizer, loader = wrap(model, sgd(model), batches(rows=7))
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return model


@habit(must="equal", launcher="by_hand")
def variables_by_hand(wrap):
    """RANK and its kin are set by hand: nobody but rank 0 keeps a store."""
    return trained(wrap)


@habit(must="equal", launcher="by_hand")
def variables_by_hand_two_wraps(wrap):
    """The same, and a second wrap: the port is taken, by ourselves."""
    return trained(wrap), trained(wrap, seed=2)


@habit(may="refused", launcher="four")
def four_variables(wrap):
    """Only what init_method="env://" asks for: no LOCAL_RANK."""
    return trained(wrap)


@habit(must="equal", launcher="srun")
def slurm(wrap):
    """srun's variables."""
    return trained(wrap)


@habit(must="equal", launcher="mpirun")
def open_mpi(wrap):
    """mpirun's variables."""
    return trained(wrap)


@habit(must="equal")
def process_group_first(wrap):
    """The script has called init_process_group, and averages its losses itself."""
    return with_group(wrap)


@habit(must="equal", launcher="by_hand")
def process_group_first_by_hand(wrap):
    """The same where RANK and its kin are set by hand."""
    return with_group(wrap)


def with_group(wrap):
    if dist.is_torchelastic_launched() or ranks() > 1:
        dist.init_process_group("gloo")
    model, losses = net(), []
    model, optimizer, loader = wrap(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model, x, y)
        loss.backward()
        optimizer.step()
        mean = loss.detach() * len(x) / 8
        if dist.is_initialized():
            dist.all_reduce(mean)
        losses.append(mean)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return model, losses


@habit(must="equal", launcher="by_hand")
def process_group_afterwards(wrap):
    """wrap first, then the script's own init_process_group, by a file."""
    import tempfile

    model = trained(wrap)
    if ranks() == 1:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
            dist.destroy_process_group()
    return model, trained(wrap, seed=2)
