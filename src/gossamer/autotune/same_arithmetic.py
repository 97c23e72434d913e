"""Whether all ranks compute the same bits from the same numbers."""

from __future__ import annotations

import torch

from gossamer.comm.channel import Channel, gathered
from gossamer.ops.fingerprint import digest
from gossamer.ops.orthogonalize import orthonormal

_SHAPES = ((1024, 256), (96, 1536))  # of matrices, as layers have
_COLUMNS = 32
UNLIKE = "; ranks compute unlike bits, on which low-rank exchanges would part: they are left out"


def computes_alike(channel: Channel, device: torch.device) -> bool:
    """Return whether the factors of a low-rank exchange have the same bits on all ranks; all must call it together.

    Kinds of processors, numbers of threads and versions of libraries order the sums of a matrix product unlike.
    """
    seed, found = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for rows, columns in _SHAPES:
        matrix, begun = (  # whole numbers, as draws from a normal distribution have bits of their own
            torch.randint(-128, 128, shape, generator=seed).to(device, torch.float32)
            for shape in ((rows, columns), (_COLUMNS, columns))
        )
        (left,) = orthonormal((begun @ matrix.mT)[None])  # (columns of P, rows)
        found.append((left.mT @ (left @ matrix)).reshape(-1).cpu())
    return len(set(gathered(channel, [digest(found, 0) % 2**48])[:, 0].tolist())) == 1
