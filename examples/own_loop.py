"""Your own training loop on any number of processes, with one new line (gossamer.wrap).

    python own_loop.py
    torchrun --nproc-per-node 2 own_loop.py      # the same parameters, to rounding

It draws two moons and learns which of them a point belongs to. At the end it prints the norm of all parameters, which
is the same on one process and on two. The last batch of an epoch has 16 rows, the others 30: that needs no thought.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer


def moons(count: int = 1216) -> TensorDataset:
    """Return points (count, 2) and the moon that each is of."""
    angle, moon = torch.rand(count) * torch.pi, torch.randint(2, (count,))
    x = torch.where(moon == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(moon == 0, angle.sin(), 0.5 - angle.sin())
    return TensorDataset(torch.stack([x, y], 1) + 0.1 * torch.randn(count, 2), moon)


def main() -> None:
    torch.manual_seed(0)  # the same data, model and shuffling on every rank
    data = moons()
    loader = DataLoader(data, batch_size=30, shuffle=True)  # global batches; no DistributedSampler
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)

    model, optimizer, loader = gossamer.wrap(model, optimizer, loader, max_grad_norm=1.0)  # the one new line
    # over a slow line: gossamer.wrap(..., exchange={"error_feedback": {"powersgd": {"rank": 4}}})

    for epoch in range(6):
        for points, moon in loader:  # this rank's rows of every batch
            loss = nn.functional.cross_entropy(model(points), moon)
            loss.backward()  # .grad is now the mean over all ranks
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if gossamer.rank() == 0:  # printing, saving and evaluating are work for one rank
            with torch.no_grad():
                right = (model(data.tensors[0]).argmax(1) == data.tensors[1]).double().mean()
            print(f"epoch {epoch + 1}: {right:.1%} right", flush=True)

    if gossamer.rank() == 0:
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
        print(f"{gossamer.ranks()} ranks, norm of the parameters {norm:.5f}")


if __name__ == "__main__":
    main()
