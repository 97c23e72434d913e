"""ACP-SGD (arXiv 2306.08881) against Power-SGD and plain S-SGD, its paper's baselines, on text, with four ranks.

The paper: the accuracy of both at half the bytes of Power-SGD and one message instead of two. Here: bytes and messages
as said, and the loss within a few per cent of both where the rate is well inside what is stable. Not at the largest
rates: dense SGD and Power-SGD bear 0.4 here, ACP-SGD of rank 4 diverges (the three tuned each: 1.43, 1.55, 1.84). It
sends 17 % of the energy of gradient and residual a step where Power-SGD sends 24 %, as it projects on a space found
a step ago, so its residual is 1.5 times as large, and late. At equal bytes, twice the rank, the two are level.
What the paper says of time is a row of benchmarks/claims.py.
"""

from __future__ import annotations

import argparse as text_of
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ExchangeContext, ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.acp_sgd import AcpSgd
from gossamer.exchange.dense import Dense
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.exchange.powersgd import PowerSgd

RANKS, STEPS, BATCH, CONTEXT, WIDTH, VOCABULARY = 4, 300, 32, 8, 128, 128
RATE = 0.1


@dataclass
class Trained:
    """One run: validation loss, bytes and messages of a rank per step (mean over an even number of them)."""

    loss: float
    factor_bytes: float
    messages: float


def text() -> Tensor:
    raw = Path(text_of.__file__).read_bytes()
    return torch.tensor([b for b in raw if b < VOCABULARY])


def draw(data: Tensor, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (count, 1), generator=rng)
    rows = data[starts + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, -1]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, VOCABULARY),
    )


def train(exchange: Exchange, lr: float = RATE) -> Trained:
    """Four ranks that hold one model: SGD with momentum 0.9 on the mean that the exchange comes to."""
    data, model = text(), network()
    cut = len(data) * 9 // 10
    params = dict(model.named_parameters())
    layout = Layout.of(params)
    sgd = torch.optim.SGD(params.values(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda s: 1 - s / STEPS)
    streams = [torch.Generator().manual_seed(r) for r in range(RANKS)]
    levels, weights = ProcessGroups.flat(RANKS), torch.full((RANKS,), 1 / RANKS, dtype=torch.float64)
    channels, states = LocalChannel.world(RANKS, levels), [exchange.init(layout)] * RANKS
    for step in range(STEPS):
        methods = []
        for rank in range(RANKS):
            x, y = draw(data[:cut], BATCH, streams[rank])
            grads = torch.autograd.grad(cross_entropy(model(x), y), list(params.values()))
            bucket = Bucket(layout, torch.cat([g.flatten() for g in grads]))
            at = ExchangeContext(rank, levels, weights, (0, step), schedule.get_last_lr()[0])
            methods.append(exchange.run(bucket, states[rank], at))
        outcomes = run_lockstep(channels, methods)
        states = [o.state for o in outcomes]
        for name, view in Bucket(layout, outcomes[0].mean).slices():
            params[name].grad = view
        sgd.step()
        schedule.step()
    x, y = draw(data[cut:], 4096, torch.Generator().manual_seed(99))
    with torch.no_grad():
        loss = cross_entropy(model(x), y).item()
    meter = channels[0].meter
    vectors = sum(e.numel for e in layout.entries if len(e.shape) < 2)
    return Trained(loss, meter.total_bytes / STEPS - 2 * (RANKS - 1) / RANKS * 4 * vectors, meter.messages / STEPS)


@pytest.fixture(scope="module")
def runs() -> dict[str, Trained]:
    methods = {
        "dense": Dense(),
        "power": ErrorFeedback(PowerSgd(rank=4)),
        "acp": ErrorFeedback(AcpSgd(rank=4)),
        "acp of rank 8": ErrorFeedback(AcpSgd(rank=8)),
        "acp without feedback": AcpSgd(rank=4),
    }
    return {name: train(method) for name, method in methods.items()}


def test_half_the_bytes_of_power_sgd_in_one_message_instead_of_two(runs: dict[str, Trained]) -> None:
    assert runs["acp"].factor_bytes == pytest.approx(runs["power"].factor_bytes / 2, rel=1e-3)
    assert runs["acp"].factor_bytes < 0.04 * runs["dense"].factor_bytes
    assert (runs["acp"].messages, runs["power"].messages) == (1, 2)


def test_the_loss_is_near_that_of_power_sgd_and_of_dense(runs: dict[str, Trained]) -> None:
    """Measured with three seeds: 1.03 to 1.04 times Power-SGD's, 1.04 to 1.06 times the dense one's."""
    assert runs["acp"].loss <= 1.06 * runs["power"].loss
    assert runs["acp"].loss <= 1.08 * runs["dense"].loss


def test_at_equal_bytes_it_is_level_with_power_sgd(runs: dict[str, Trained]) -> None:
    """Measured with three seeds: 1.005 to 1.014."""
    assert runs["acp of rank 8"].factor_bytes == pytest.approx(runs["power"].factor_bytes, rel=1e-3)
    assert runs["acp of rank 8"].loss <= 1.025 * runs["power"].loss


def test_it_needs_feedback(runs: dict[str, Trained]) -> None:
    assert runs["acp without feedback"].loss >= 1.15 * runs["acp"].loss
