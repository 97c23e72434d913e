"""Steps that losses alone decide: slopes are autograd's, ranks never part, a joiner arrives where they are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from gossamer import sync
from gossamer.comm.message import ProcessGroups
from gossamer.plan import price_probed
from gossamer.spec.errors import BadInput, CheckpointMismatch, WireMismatch
from gossamer.sync import ParameterChecksum, StepMessage, ZerothOrderConfig, ZerothOrderRank, parsed
from gossamer.sync._float8 import NOT_FINITE, decode, encode
from pool import Pool
from sync.probing_jobs import flat, loss_of, start


class Alone:
    """As much of a replica as one rank needs."""

    rank = 0

    def shares(self) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float64)


def probing(params: dict[str, torch.Tensor], **settings: Any) -> ZerothOrderRank:
    truth = {n: p if p.dtype in (torch.float32, torch.float64) else p.float() for n, p in params.items()}
    return ZerothOrderRank(
        ZerothOrderConfig(**{"directions": 1, "epsilon": 1e-3, **settings}), params, truth, Alone(), 7
    )  # type: ignore[arg-type]


class Among(Alone):
    """One of several, who hear these checksums."""

    def __init__(self, *sums: float) -> None:
        self.sums = sums

    def gather(self, row: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(self.sums, dtype=torch.float64).reshape(-1, 1)


@pytest.mark.parametrize(
    ("sums", "who"),
    [
        ((7.0, 5.0, 5.0, 5.0), "rank 0 differs from the other 3"),
        ((5.0, 5.0, 7.0), "rank 2 differs from the other 2"),
        ((5.0, 7.0), "rank 0 and rank 1 differ"),
    ],
)
def test_who_is_elsewhere_is_for_the_majority_to_say(sums: tuple[float, ...], who: str) -> None:
    one = replace(probing(start(torch.float32)), replica=Among(*sums))
    mark = one.checksum(400)
    with pytest.raises(WireMismatch, match=f"after step 400 the parameters are not the same on all ranks: {who}$"):
        one.agreed(mark)
    assert replace(one, replica=Among(5.0, 5.0, 5.0)).agreed(mark) is mark


def test_every_code_is_its_number_and_comes_back() -> None:
    for code in range(256):
        if code != NOT_FINITE:
            assert encode(decode(code), 0.5) == code
    values = [decode(code) for code in range(128)]
    assert values == sorted(set(values)) and values[0] == 0 and values[1] == 2**-17 and values[-1] == 57344
    assert [decode(code | 0x80) for code in range(1, 128)] == [-value for value in values[1:]]
    assert all(b <= 1.25 * a or b - a == 2**-17 for a, b in pairwise(values))


def test_what_is_too_large_saturates_and_what_is_not_finite_is_said() -> None:
    for value in (57344.0, 57345.0, 1e30):
        assert decode(encode(value, 0.99)) == 57344 and decode(encode(-value, 0.0)) == -57344
    for value in (math.nan, math.inf, -math.inf):
        assert encode(value, 0.5) == NOT_FINITE
    assert math.isnan(decode(NOT_FINITE))


@pytest.mark.parametrize("value", [3e-6, -1e-4, 0.37, -1.1, 1234.5])
def test_the_mean_of_what_is_decoded_is_the_number(value: float) -> None:
    count = 4096
    decoded = [decode(encode(value, (i + 0.5) / count)) for i in range(count)]
    assert sum(decoded) / count == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_slopes_are_autograd_s_to_the_square_of_epsilon(kind: torch.dtype) -> None:
    """Divided by the square, the difference is the same for every epsilon: a third derivative."""
    params = start(kind)
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    loss_of(leaves).backward()
    over = []
    for epsilon in (0.2, 0.1, 0.05):
        one = probing(params, epsilon=epsilon)
        with one._put_back() as kept:
            ahead, behind = (one._shifted(3, 0, way, kept, lambda: float(loss_of(params))) for way in (1, -1))
            one._shifted(3, 0, 1, {n: torch.zeros_like(p) for n, p in kept.items()}, lambda: 0.0)
            slope = sum(float((leaves[n].grad * p).sum()) for n, p in params.items()) / epsilon
        over.append(((ahead - behind) / (2 * epsilon) - slope) / epsilon**2)
    assert abs(over[0]) > 1e-4
    assert over[1] == pytest.approx(over[2], rel=0.1)
    assert over[0] == pytest.approx(over[2], rel=0.3)


def test_the_estimate_s_mean_is_the_gradient() -> None:
    """And the mean square of the slopes is that of its norm."""
    params = start()
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    loss_of(leaves).backward()
    wanted = torch.cat([p.grad.flatten() for p in leaves.values()])
    one, before = probing(params, directions=400), torch.tensor(flat(params))
    vote = one.look(0, lambda: float(loss_of(params)))
    one.take(StepMessage(step=0, rate=1.0, clip=0.0, labels=(1.0,), codes=bytes(vote.beside.tolist())))
    found = before - torch.tensor(flat(params))
    noise = float(wanted.norm()) * math.sqrt(1 / 400)  # per number
    assert float((found - wanted).norm()) < 1.2 * noise * math.sqrt(len(wanted))
    assert float(found @ wanted / wanted.norm() ** 2) == pytest.approx(1.0, abs=0.25)
    assert vote.squared == pytest.approx(float(wanted.norm() ** 2), rel=0.25)


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (2, {"alike": False}),
        (3, {"alike": False, "samples": 2, "labels": [1.0, 5.0, 2.0]}),
        (3, {"alike": False, "labels": [3.0, 0.0, 1.0]}),
        (2, {"dtype": "bfloat16", "alike": False}),
        (2, {"clip": 0.01, "alike": False}),
    ],
)
def test_ranks_never_part_and_a_joiner_arrives_where_they_are(pool: Pool, ranks: int, given: dict[str, Any]) -> None:
    found = pool.run("sync.probing_jobs:steps", ranks, count=12, **given)
    for one in found:
        assert one["at"] == found[0]["at"] and one["said"] == found[0]["said"]
        assert one["back"], "what was shifted is put back bit for bit"
        assert one["follows"]
    params = start(getattr(torch, given.get("dtype", "float32")))
    joiner = probing(params)
    for line in found[0]["said"]:
        heard = parsed(json.loads(json.dumps(line)))
        assert isinstance(heard, StepMessage)
        joiner.take(heard)
    assert flat(params) == found[0]["at"][-1]
    assert flat(params) != flat(start(params["scale"].dtype))


@pytest.mark.parametrize("samples", [1, 3])
def test_n_ranks_are_one_machine_with_n_times_the_directions(pool: Pool, samples: int) -> None:
    """Bit for bit, bytes included: a direction and its rounding are keyed by their number among all."""
    many = pool.run("sync.probing_jobs:steps", 2, count=8, samples=samples)
    alone = pool.run("sync.probing_jobs:steps", 1, count=8, samples=2 * samples)
    assert many[0]["at"] == alone[0]["at"]
    assert many[0]["norms"] == pytest.approx(alone[0]["norms"])
    assert alone[0]["losses"][-1] < alone[0]["losses"][0]


@pytest.mark.parametrize(("ranks", "samples"), [(2, 1), (3, 5)])
def test_one_byte_per_rank_and_direction(pool: Pool, ranks: int, samples: int) -> None:
    found = pool.run("sync.probing_jobs:steps", ranks, count=3, samples=samples)
    probe = sync.build({"just_one_byte": {"directions": samples}}).probe
    assert probe is not None
    forecast = price_probed(probe, ProcessGroups.flat(ranks))
    for rank, one in enumerate(found):
        assert one["sent"] == [(ranks - 1) * (samples + 8 + 40)] * 3  # beside weights and votes
        assert forecast.sent_bytes[rank] == one["sent"][0]


def test_a_loss_that_is_not_finite_moves_nothing_and_is_blamed_on_its_rank(pool: Pool) -> None:
    found = pool.run("sync.probing_jobs:steps", 3, count=3, poison=[1, 1])
    for one in found:
        assert one["finite"] == [[True], [False, 1], [True]]
        assert one["at"][1] == one["at"][0] and one["at"][2] != one["at"][1]


def test_clipping_bounds_every_slope() -> None:
    moves = []
    for clip, slope in ((0.0, 4.0), (0.5, 4.0), (0.5, -4.0), (0.5, 0.25)):
        params = start()
        before = torch.tensor(flat(params))
        probing(params).take(
            StepMessage(step=0, rate=1e-2, clip=clip, labels=(1.0,), codes=bytes([encode(slope, 0.0)]))
        )
        moves.append(float((torch.tensor(flat(params)) - before).abs().mean()))
    assert moves == pytest.approx([0.04, 0.005, 0.005, 0.0025], rel=1e-4)


STEP = StepMessage(step=3, rate=0.1, clip=1.0, labels=(4.0, 5.0), codes=b"\x12\x92")
MARK = ParameterChecksum(step=3, parameters="ab", checksum=12, begins=True)
BAD: list[tuple[Any, str]] = [
    ({}, "wanted an entry of kind step or mark"),
    ({"kind": ["step"]}, "wanted an entry of kind step or mark"),
    ({**STEP.line(), "more": 1}, "got the keys"),
    ({**STEP.line(), "step": -1}, "step: wanted int of 0 or more, got -1"),
    ({**STEP.line(), "step": True}, "step: wanted int of 0 or more, got True"),
    ({**STEP.line(), "step": 1.0}, "step: wanted int"),
    ({**STEP.line(), "rate": "0.1"}, "rate: wanted float"),
    ({**STEP.line(), "rate": math.nan}, "rate: wanted float of 0 or more"),
    ({**STEP.line(), "labels": [1.0, math.inf]}, "labels: wanted float of 0 or more"),
    ({**STEP.line(), "labels": []}, "codes: wanted as many for each of 0 ranks"),
    ({**STEP.line(), "codes": "123456"}, "codes: wanted as many for each of 2 ranks, got 3 in all"),
    ({**STEP.line(), "codes": "1z"}, "codes: non-hexadecimal"),
    ({**STEP.line(), "codes": "1280"}, "codes: wanted finite steps only, got the code of one that is not finite"),
    ({**STEP.line(), "buffers": 0}, "buffers: wanted bool"),
    ({**MARK.line(), "checksum": "x"}, "checksum: wanted int"),
]


def test_lines_come_back() -> None:
    assert parsed(json.loads(json.dumps(STEP.line()))) == STEP
    assert parsed(json.loads(json.dumps(MARK.line()))) == MARK


@pytest.mark.parametrize(("line", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_lines_that_are_not_ours(line: Any, said: str) -> None:
    with pytest.raises(CheckpointMismatch, match=said):
        parsed(line)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"directions": 0}, "directions: wanted at least 1 direction, got 0"),
        ({"epsilon": 0.0}, "epsilon: wanted a step length above 0 and below 1, got 0"),
        ({"epsilon": 1.5}, "epsilon: wanted a step length above 0 and below 1, got 1.5"),
    ],
)
def test_bad_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        sync.build({"just_one_byte": settings}, key="plan.sync")
    assert said in str(caught.value)
