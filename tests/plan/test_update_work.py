"""What Muon's matmuls cost beside a step is said by the plan, before the run."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer import optimizer as optimizer_methods
from gossamer import plan
from gossamer.plan._update_work import UpdateWork
from gossamer.spec.config import RunConfig

SHAPES = (("embed.weight", (1000, 64)), ("up.weight", (256, 64)), ("norm", (64,)))


@pytest.mark.parametrize(
    ("short", "long", "tokens", "share"), [(256, 1024, 1024, 0.94), (256, 1024, 8192, 0.12), (768, 3072, 8192, 0.35)]
)
def test_share_is_that_of_the_closed_form(short: int, long: int, tokens: int, share: float) -> None:
    """(20 A + 10 A^2 / B) / (6 T), whichever side is the shorter one."""
    for shape in ((short, long), (long, short)):
        work = UpdateWork.of(optimizer_methods.build("muon"), [("up.weight", shape)])
        assert work is not None
        assert work.share(tokens) == pytest.approx((20 * short + 10 * short**2 / long) / (6 * tokens))
        assert work.share(tokens) == pytest.approx(share, abs=0.005)
        assert work.share(work.tokens(0.05)) == pytest.approx(0.05, rel=1e-3)


def test_embeddings_and_vectors_are_no_work_and_ranks_share_it() -> None:
    rule = optimizer_methods.build("muon")
    one, alone = UpdateWork.of(rule, SHAPES), UpdateWork.of(rule, SHAPES[1:2])
    assert one == alone and one is not None
    shared = UpdateWork.of(rule, SHAPES, ranks=4)
    assert shared is not None and shared.share(100) == pytest.approx(one.share(100) / 4)
    assert UpdateWork.of(optimizer_methods.build("adamw"), SHAPES) is None


def reasons(optimizer: Any, ranks: int = 1, **planned: Any) -> dict[str, str]:
    config = RunConfig.model_validate(
        {
            "train": {"optimizer": optimizer, "batch": 8, "steps": 4},
            "data": {"sequence": 128},
            "machines": {"processes": ranks},
            "plan": planned,
        }
    )
    found = plan.build("data_parallel").plan(plan.Request(config=config, ranks=ranks, shapes=SHAPES))
    return dict(found.reasons)


def test_the_plan_says_what_the_update_costs() -> None:
    """A 64, B 256: 20 A^2 B + 10 A^3 flop; a twentieth of 6 A B T at T = 4800; 1,024 tokens here."""
    flop = 20 * 64**2 * 256 + 10 * 64**3
    said = reasons("muon")["optimizer"]
    assert f"{flop:.3g} flop" in said and "4,800 tokens" in said and "23 % of this run's 1,024" in said
    assert "1,024" in reasons({"by_pattern": {"inner": "muon"}})["optimizer"]
    assert "47 % of this run's 512" in reasons("muon", ranks=2)["optimizer"]
    whole = reasons("muon", ranks=2, sharding={"zero1": {"whole": True}})["optimizer"]
    assert "2,400 tokens" in whole and "23 % of this run's 512" in whole
    assert "optimizer" not in reasons("adamw")
