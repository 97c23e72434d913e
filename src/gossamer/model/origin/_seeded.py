"""Building under a seed of one's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body with torch's, numpy's and `random`'s generators seeded; they are put back afterwards."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    before_gpu = torch.cuda.get_rng_state_all() if on_gpu else []
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it would reseed a GPU not yet in use
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(before_gpu)
