"""The pages on splitting a model: their code runs and prints what they say, their keys exist, their errors are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.split_points import SplitPoints, balanced_split, stage_specs
from gossamer.model.units import unit_names
from gossamer.p2p import activation
from gossamer.pipeline import schedule
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from model.cuttable import Chain, rows
from model.plain import WIDTH as WIDE
from model.test_chance import Dropping, by_torch
from model.test_cut import Branching, Frozen, Leaking
from model.test_cut_modules import Boxes

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = (HOWTO / "split_into_stages.md").read_text()
ACTIVATIONS = (HOWTO / "compress_activations.md").read_text()


def blocks(kind: str, page: str = PAGE) -> list[str]:
    """What stands in fences of this kind."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == kind]


def test_the_check_in_one_process_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,), (printed,) = blocks("python"), blocks("")
    names: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(0)
    exec(compile(code, "split_into_stages.md", "exec"), names)
    assert capsys.readouterr().out.strip() == printed.strip()
    assert names["ours"].gradients.keys() == dict(names["model"].named_parameters()).keys()


def _with_alternatives(block: str) -> list[str]:
    """As it stands, and with each key that is commented out in place of the same one above it."""
    keys = re.findall(r"^  # (\w+): ", block, re.MULTILINE)
    texts = [block]
    for key in keys:
        without = re.sub(rf"^  {key}:.*\n", "", block, flags=re.MULTILINE)
        texts.append(without.replace(f"  # {key}:", f"  {key}:"))
    return texts


def test_every_key_is_one_of_the_configuration() -> None:
    both = blocks("yaml") + blocks("yaml", ACTIVATIONS)
    texts = [text for block in both for text in _with_alternatives(block)]
    assert len(texts) == 12
    for text in texts:
        plan = RunConfig.model_validate(yaml.safe_load(text)).plan
        written = plan.activation_compression
        for one in written if isinstance(written, list) else [written]:
            activation.build(one, key="plan.activation_compression")
        if plan.pipeline_schedule != "auto":
            schedule.build(plan.pipeline_schedule, key="plan.pipeline_schedule")


def _refuse(module: nn.Module, cuts: int | tuple[str, ...], width: int = 12) -> None:
    x = rows() if width == 12 else torch.randn(5, width)
    ways = InputVariants(
        module, lambda module, _: module(x.requires_grad_()).sum(), SplitPoints(()), unit_names(module)
    )
    flow = ways.flow({})
    ways.check_chance({}, flow)
    stage_specs(module, flow, balanced_split(flow, cuts) if isinstance(cuts, int) else SplitPoints(cuts))


REFUSED: list[tuple[nn.Module, int | tuple[str, ...], int]] = [
    (Chain(), 6, 12),
    (nn.Linear(12, 12), 2, 12),
    (Chain(), ("blocks.0", "blocks.1.mix"), 12),
    (Branching(), ("blocks.0", "blocks.2"), 12),
    (Leaking(), 2, 12),
    (Boxes(), 2, WIDE),
    (Dropping(by_torch, 0.5), 2, 4),
    (Frozen(), 2, 12),
]


def test_every_refusal_of_the_page_is_one() -> None:
    rows_of_page = re.findall(r"^\| ((?:wanted|got) .*?) \|", PAGE, re.MULTILINE)
    for row, (module, cuts, width) in zip(rows_of_page, REFUSED, strict=True):
        with pytest.raises(BadInput) as refused:
            _refuse(module, cuts, width)
        assert row in str(refused.value)
