"""Discrete key-value bottleneck: class-incremental learning on a frozen encoder (Traeuble et al. 2023).

Paper: Traeuble, Goyal, Rahaman, Mozer, Kawaguchi, Bengio, Schoelkopf: Discrete Key-Value Bottleneck, ICML 2023,
    arXiv:2207.11240.
Equations: z = encoder(x) ;  z_c = P_c z ;  j_c = argmin_j |z_c - K_cj|  (the lowest j of equals)
           logits = (1/C) sum_c V_c,j_c ;  loss: cross entropy of softmax(logits)
    keys, once, on unlabelled data (EMA k-means, per codebook): n_j <- g n_j + (1 - g) |A_j| ;
    m_j <- g m_j + (1 - g) sum over A_j of z ;  K_j = m_j / n'_j,  n'_j = (n_j + e) / (N + J e) N,  N = sum n_j
Symbols: C codebooks of J pairs; P_c (k, d) random, fixed; K (C, J, k) frozen; V (C, J, classes) trained, 0 at first;
    A_j the samples of a batch nearest to key j; g 0.95, e 1e-5. A key with n_j < 1/2 is moved to a sample of the batch.
State: C J (k + classes) numbers, of which C J classes are trained.
What stays: a value that no sample of a batch fetches has a gradient of exactly 0. A step of plain SGD without momentum
    or weight decay leaves it bit for bit, and with it the logits of inputs that fetch none of the others. An optimizer
    with memory (momentum, Adam) goes on moving values that were fetched before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.spec.errors import bad_input
from gossamer.spec.user_function import function_named

_DECAY, _EPS, _LEAST = 0.95, 1e-5, 0.5
_KEY = "model.config"


class KeyValueBottleneck(nn.Module):
    """A bottleneck behind `encoder`, which is frozen. All but the values is.

    features: d, of the encoder's output (rows, d); classes: of the values; codebooks, pairs, key_width: C, J, k.
    """

    projections: Tensor
    keys: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        *,
        features: int,
        classes: int,
        codebooks: int = 64,
        pairs: int = 128,
        key_width: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.encoder = encoder.requires_grad_(False).eval()
        projections = torch.randn(codebooks, key_width, features, generator=drawn) / features**0.5
        self.register_buffer("projections", projections)
        self.register_buffer("keys", torch.randn(codebooks, pairs, key_width, generator=drawn))
        self.values = nn.Parameter(torch.zeros(codebooks, pairs, classes))

    def train(self, mode: bool = True) -> KeyValueBottleneck:
        """Set the mode. The encoder stays in that of evaluation: keys are of what it gave when they were placed."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.read(self.fetched(inputs))

    @torch.no_grad()
    def fetched(self, inputs: Tensor) -> Tensor:
        """Return the number of the key of each codebook that each input fetches: (rows, codebooks)."""
        return _nearest(self._projected(inputs), self.keys).t()

    def read(self, fetched: Tensor) -> Tensor:
        """Return the logits of fetched pairs: (rows, classes)."""
        codebooks, pairs, classes = self.values.shape
        at = fetched + torch.arange(codebooks, device=fetched.device) * pairs
        found: Tensor = F.embedding(at, self.values.view(-1, classes)).mean(1)
        return found

    @torch.no_grad()
    def fit_keys(self, batches: Iterator[Tensor], *, seed: int = 0) -> None:
        """Set the keys by k-means on unlabelled inputs, batch by batch. The first batch gives the first keys."""
        drawn = torch.Generator().manual_seed(seed)
        counts = torch.ones(self.keys.shape[:2])
        sums: Tensor | None = None
        for batch in batches:
            z = self._projected(batch)  # (codebooks, rows, key_width)
            if sums is None:
                self.keys.copy_(_drawn(z, self.keys.shape[1], drawn))
                sums = self.keys.clone()
            at = _nearest(z, self.keys)
            chosen = F.one_hot(at, self.keys.shape[1]).to(z.dtype)  # (codebooks, rows, pairs)
            counts = _DECAY * counts + (1 - _DECAY) * chosen.sum(1)
            sums = _DECAY * sums + (1 - _DECAY) * chosen.transpose(1, 2) @ z
            is_dead = counts < _LEAST
            fresh = _drawn(z, self.keys.shape[1], drawn)
            counts = torch.where(is_dead, torch.ones_like(counts), counts)
            sums = torch.where(is_dead[..., None], fresh, sums)
            total = counts.sum(1, keepdim=True)
            smooth = (counts + _EPS) / (total + counts.shape[1] * _EPS) * total
            self.keys.copy_(sums / smooth[..., None])
        if sums is None:
            raise bad_input(
                wanted="unlabelled inputs to place the keys by", got="none", do="give at least one batch", key=_KEY
            )

    def _projected(self, inputs: Tensor) -> Tensor:
        """Return z_c of every input: (codebooks, rows, key_width)."""
        z = self.encoder(inputs)
        if z.ndim != 2 or z.shape[1] != self.projections.shape[2]:
            raise bad_input(
                wanted=f"an encoder that returns (rows, {self.projections.shape[2]})",
                got=f"{tuple(z.shape)}",
                do="set features to its width, or pool its output",
                key=_KEY,
            )
        found: Tensor = z @ self.projections.transpose(1, 2)
        return found


def _nearest(z: Tensor, keys: Tensor) -> Tensor:
    """Return the number of the nearest key of each row of z: (codebooks, rows)."""
    return (keys.square().sum(-1)[:, None] - 2 * z @ keys.transpose(1, 2)).argmin(-1)


def _drawn(z: Tensor, count: int, drawn: torch.Generator) -> Tensor:
    """Return `count` rows of z, other ones for every codebook; a few of them twice where there are fewer rows."""
    rows = torch.stack([torch.randperm(max(z.shape[1], count), generator=drawn)[:count] for _ in z]) % z.shape[1]
    return torch.gather(z, 1, rows[..., None].expand(-1, -1, z.shape[2]))


def key_value_bottleneck(
    *,
    classes: int,
    features: int,
    unlabelled: str,
    encoder: str = "",
    codebooks: int = 64,
    pairs: int = 128,
    key_width: int = 8,
    batch: int = 256,
    passes: int = 5,
    seed: int = 0,
) -> KeyValueBottleneck:
    """Return a bottleneck whose keys are placed; a factory for `model.factory`, with the loss classification.

    unlabelled: "package.module:function" that returns inputs (N, ...) without labels; encoder: one that returns the
    frozen module, or "" for inputs that are features already. passes: over the unlabelled inputs, by `batch`.
    """
    built = function_named(encoder, key=_KEY)() if encoder else nn.Identity()
    sizes = {"codebooks": codebooks, "pairs": pairs, "key_width": key_width}
    if min(*sizes.values(), classes, features, passes, batch) < 1:
        raise bad_input(wanted="sizes of at least 1", got=str(sizes), do="write larger ones", key=_KEY)
    found = KeyValueBottleneck(built, features=features, classes=classes, **sizes, seed=seed)
    inputs: Tensor = function_named(unlabelled, key=_KEY)()
    drawn = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[Tensor]:
        for _ in range(passes):
            yield from torch.split(inputs[torch.randperm(len(inputs), generator=drawn)], batch)

    found.fit_keys(batches(), seed=seed)
    return found
