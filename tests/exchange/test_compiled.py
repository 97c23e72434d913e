"""Kernels of an exchange's codecs are compiled when its buckets are made."""

from __future__ import annotations

import pytest
import torch

from gossamer import exchange
from gossamer.exchange import compile_kernels
from gossamer.ops import fused

WRITTEN = {"error_feedback": {"two_shot": {"codec": "int8", "return_codec": {"hadamard": "int4"}}}}
CPU = torch.device("cpu")
PRESENT = fused.Kernels("torch", lambda: fused)  # a package that is installed


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int, bool]]:
    """The operations whose kernels are asked for; passes do them."""
    found: set[tuple[str, int, bool]] = set()

    def note(kind: fused._Kind, device: torch.device) -> None:
        found.add((kind.operation, kind.bits, kind.loses))

    monkeypatch.setattr(fused, "_compared", note)
    return found


def test_every_codec_of_an_exchange_is_compiled(
    asked: set[tuple[str, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cpu": PRESENT})
    compile_kernels(exchange.build(WRITTEN), CPU)
    assert asked == {
        *(("quantize", bits, loses) for bits in (8, 4) for loses in (False, True)),
        *((name, 8, False) for name in ("dequantize", "add_dequantized")),
        *(("dequantize", 4, False), ("add_dequantized", 4, False)),
    }


@pytest.mark.parametrize("why", ["not installed", "switched off", "another device"])
def test_nothing_is_encoded_where_no_kernel_is(
    why: str, asked: set[tuple[str, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = fused.Kernels("not_installed", lambda: fused) if why == "not installed" else PRESENT
    monkeypatch.setattr(fused, "DEVICES", {"cuda" if why == "another device" else "cpu": kernels})
    monkeypatch.setenv(fused.SWITCH, "0" if why == "switched off" else "1")
    compile_kernels(exchange.build(WRITTEN), CPU)
    assert not asked
