"""Activations in a file: bit-equal training within the limits, what stays, what is refused, what is left behind."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import loss
from gossamer.model.ghost_step import ghost_step
from gossamer.model.source.hf import Hf
from gossamer.model.units import unit_names
from gossamer.saver import Saver, Site, build
from gossamer.saver import activation_swap as method
from gossamer.saver._recomputed_unit import RecomputedUnit
from gossamer.saver._swap_store import SwapStore
from gossamer.saver._swapped_unit import SwappedUnit
from gossamer.sharding import TierAccount
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.store.tier_file import PAGE, TierFile
from model.tiny import CONFIGS, batch
from saver.training import Busy, equal, trained

STAGING = 1 << 20


def gpt2() -> nn.Module:
    return Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256).build(0)


def saver(folder: Path, **settings: Any) -> Saver:
    given = {"host": "8MiB", "file": "16MiB", "directory": str(folder), "least": 1, "units": "all", **settings}
    built: Saver = build({"activation_swap": given})
    return built


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[SwapStore]:
    """All stores that are made."""
    seen: list[SwapStore] = []
    of = SwapStore.of
    monkeypatch.setattr(SwapStore, "of", staticmethod(lambda *given: (seen.append(of(*given)), seen[-1])[1]))
    return seen


def store_of(folder: Path, *, host: int, size: int = 4 << 20) -> SwapStore:
    return SwapStore.of(TierFile.create(folder / "one.swap", size), TierAccount("host", host))


def settled(store: SwapStore) -> None:
    """Wait until all that has been put is written, and all reads that have begun are done."""
    for pool in (store._writer, store._reader):
        pool.submit(lambda: None).result()


@pytest.mark.parametrize("make", [gpt2, Busy])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_bit_equal_within_the_smallest_host(
    tmp_path: Path, stores: list[SwapStore], make: Callable[[], nn.Module], precision: str
) -> None:
    """One byte less is refused with this number; with it little is in flight, so almost all is written and read."""
    plain = trained(make, [], precision=precision)
    host = STAGING
    while True:
        try:
            ours = trained(make, [saver(tmp_path, host=host)], precision=precision)
            break
        except BadInput as refused:
            stores[-1].close()
            found = re.search(r"set host to (\d+)", str(refused))
            assert found is not None and int(found.group(1)) > host
            host = int(found.group(1))
    assert equal(ours, plain)
    store = stores[-1]
    assert store.host.peak <= host == store.host.limit
    assert store.written_bytes > store.put_bytes // 2 and store.read_bytes > store.put_bytes // 2
    assert store.is_closed and not list(tmp_path.iterdir())
    with pytest.raises(BadInput, match=f"set host to {host} or more"):
        trained(make, [saver(tmp_path, host=host - 1)], precision=precision)
    stores[-1].close()


def test_nothing_of_the_file_is_seen_while_a_run_trains(tmp_path: Path) -> None:
    seen: list[int] = []
    folder = tmp_path / "there"
    trained(Busy, [saver(folder)], watch=lambda _: seen.append(len(list(folder.iterdir()))))
    assert seen == [0]


class Shared(nn.Module):
    """A unit whose layers save one input, a view of a weight, a buffer, and the output of tanh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.map = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("scale", torch.randn(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((self.one(x) + self.two(x) + x @ self.map.t()) * self.scale)


def installed(module: nn.Module, folder: Path, **settings: Any) -> Any:
    site = Site(units=("0",), objective=loss.build("next_token"))
    return saver(folder, **settings).install(nn.Sequential(module), site)


def test_a_storage_goes_once_and_weights_views_of_them_buffers_and_small_tensors_stay(
    tmp_path: Path, stores: list[SwapStore]
) -> None:
    module, x = Shared(), torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    there = installed(module, tmp_path)
    out = module(x)
    product = 128 * 64 * 4
    assert stores[-1].put_bytes == 2 * product, "the input of three products, and the output"
    out.sum().backward()
    there.remove()
    ours = {name: p.grad for name, p in module.named_parameters()}
    plain = Shared()
    plain(x).sum().backward()
    assert all(torch.equal(p.grad, ours[name]) for name, p in plain.named_parameters() if p.grad is not None)
    there = installed(module, tmp_path, least=product + 1)
    module(x).sum().backward()
    assert stores[-1].put_bytes == 0
    there.remove()


def test_a_saved_tensor_that_is_written_to_is_refused_as_by_autograd(tmp_path: Path) -> None:
    for least in (1, "1MB"):  # one that goes, and one that stays
        module, x = Shared(), torch.randn(128, 64)
        there = installed(module, tmp_path, least=least)
        out = module(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        there.remove()


def test_a_graph_that_is_kept_has_two_backward_passes(tmp_path: Path, stores: list[SwapStore]) -> None:
    module, x = Shared(), torch.randn(128, 64)
    there = installed(module, tmp_path)
    out = module(x).sum()
    settled(stores[-1])
    out.backward(retain_graph=True)
    first = module.map.grad
    assert first is not None
    first = first.clone()
    module.zero_grad()
    out.backward()
    assert module.map.grad is not None and torch.equal(module.map.grad, first)
    there.remove()


def test_a_graph_that_is_dropped_gives_its_part_of_the_file_back(tmp_path: Path, stores: list[SwapStore]) -> None:
    """Forward passes without a backward: of each hundred, the file has room for a few."""
    module, x = Shared(), torch.randn(128, 64)
    there = installed(module, tmp_path, file="1MiB", host="2MiB")
    for _ in range(100):
        module(x)
        settled(stores[-1])
    kept = [module(x) for _ in range(3)]
    kept[0].sum().backward()
    there.remove()


def test_a_file_that_is_too_small_is_refused_with_the_bytes(tmp_path: Path) -> None:
    module, x = Shared(), torch.randn(128, 64)
    there = installed(module, tmp_path, file=128 * 64 * 4)
    with pytest.raises(BadInput, match=r"activation_swap.file: wanted more than 65536 bytes .*, got 32768 bytes"):
        module(x)
    there.remove()


def test_a_disk_that_is_too_small_and_other_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"activation_swap.directory: wanted \d+ bytes .*, got \d+ bytes .* free"):
        installed(Shared(), tmp_path, file="900TiB")
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadInput, match="units"):
        saver(tmp_path, units="some")
    with pytest.raises(BadInput, match="a size such as"):
        saver(tmp_path, host="much")
    with pytest.raises(BadInput, match="names of units"):
        installed(Shared(), tmp_path, units=["blocks.7"])
    module = Shared()
    module.compile()
    with pytest.raises(BadInput, match=r"model\.compile"):
        installed(module, tmp_path)
    assert threading.active_count() < 50


def test_an_error_of_the_disk_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Shared(), torch.randn(128, 64)
    there = installed(module, tmp_path, file="1MiB")

    def fails(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(TierFile, "write", fails)
    with pytest.raises(RunFailed, match="no space left on device"):
        for _ in range(100):
            module(x).sum().backward()
    monkeypatch.undo()
    there.remove()


def test_backward_asks_for_one_and_those_before_it_are_read_ahead_as_far_as_the_limit_goes(tmp_path: Path) -> None:
    store = store_of(tmp_path, host=STAGING + 3 * PAGE)
    values = [torch.full((1024,), float(i)) for i in range(8)]
    kept = []
    for value in values:
        kept.append(store.put(value))
        settled(store)
    assert store.host.used == STAGING and store.written_bytes == 8 * PAGE
    assert torch.equal(store.get(kept[7]), values[7])
    settled(store)
    assert [one.record.at.value for one in kept] == ["away"] * 4 + ["ahead"] * 3 + ["used"]
    assert store.host.used == store.host.limit == store.host.peak
    read = store.read_bytes
    assert torch.equal(store.get(kept[6]), values[6])
    settled(store)
    assert store.read_bytes == read + PAGE, "the next one, in the place of the one that was handed out"
    kept.append(store.put(torch.zeros(1024)))  # a new one needs room: the one that is needed last goes
    assert kept[3].record.at.value == "away"
    del kept[5:]
    store._reclaim()
    settled(store)
    assert store.host.used <= store.host.limit
    assert all(torch.equal(store.get(one), value) for one, value in zip(kept[::-1], values[4::-1], strict=True))
    kept.clear()
    store._reclaim()
    settled(store)
    store._reclaim()
    assert store.host.used == STAGING and store._extents.free == [(0, 4 << 20)]
    store.close()


def test_what_is_not_written_yet_is_handed_out_and_not_written(tmp_path: Path) -> None:
    store, gate = store_of(tmp_path, host=STAGING + 4 * PAGE), threading.Event()
    store._writer.submit(gate.wait)
    value = torch.arange(1024.0)
    kept = store.put(value)
    assert store.get(kept).data_ptr() == value.data_ptr()
    gate.set()
    settled(store)
    assert store.written_bytes == 0 and store.read_bytes == 0
    store.close()


def test_tensors_come_back_with_their_strides_and_alignment(tmp_path: Path) -> None:
    store = store_of(tmp_path, host=2 * STAGING)
    whole = torch.arange(5000.0)
    for one in (whole[3:].view(-1), whole.view(50, 100).t()[:, 7:], whole[:100].expand(4, 100), torch.zeros(0)):
        kept = store.put(one)
        settled(store)
        back = store.get(kept)
        assert torch.equal(back, one) and back.stride() == one.stride()
        assert back.numel() == 0 or back.data_ptr() % 64 == one.data_ptr() % 64
    store.close()


def without_dropout(module: nn.Module) -> nn.Module:
    for inner in module.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0
    return module.train()


def chosen_of(module: nn.Module) -> dict[str, int]:
    inner = [vars(one).get("forward") for one in module.modules()]
    kinds: Mapping[str, type] = {"swapped": SwappedUnit, "recomputed": RecomputedUnit}
    return {name: sum(isinstance(one, kind) for one in inner) for name, kind in kinds.items()}


@pytest.mark.parametrize(("rate", "wanted"), [(1e15, "swapped"), (1.0, "recomputed")])
def test_a_slow_file_recomputes_and_a_fast_one_swaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, wanted: str
) -> None:
    """Measuring leaves nothing behind, and both ways train as plain training does."""
    monkeypatch.setattr(method, "mixed_rate", lambda _: rate)
    module, rows = without_dropout(gpt2()), batch()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    site = Site(units=unit_names(module), objective=loss.build("next_token"), batch=rows, rows=2)
    there = saver(tmp_path, units="auto").install(module, site)
    found = chosen_of(module)
    assert found[wanted] == sum(found.values()) == CONFIGS["gpt2"]["n_layer"]
    assert re.search(rf"{found['swapped']} of \d units swap .* {found['recomputed']} are recomputed", there.told)
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    plain = without_dropout(gpt2())
    for one in (module, plain):
        site.objective(one(input_ids=rows["input_ids"]), rows).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), module.parameters(), strict=True))
    there.remove()
    assert sum(chosen_of(module).values()) == 0


def test_units_that_change_python_state_are_never_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method, "mixed_rate", lambda _: 1.0)
    module = Busy().train()
    site = Site(units=unit_names(module), objective=loss.build("next_token"), batch=batch())
    there = saver(tmp_path, units="auto").install(module, site)
    assert chosen_of(module) == {"swapped": 3, "recomputed": 0}
    assert [block.calls for block in module.blocks] == [0, 0, 0]  # type: ignore[union-attr]
    there.remove()


def test_the_memory_forecast_counts_what_stays(tmp_path: Path) -> None:
    module, rows = gpt2(), batch(rows=8, sequence=128)
    settings: list[dict[str, Any] | None] = [None, {"host": "1"}, {"host": "100MiB"}]

    def run(outline: nn.Module, given: dict[str, Any] | None) -> Tensor:
        site = Site(units=unit_names(module), objective=loss.build("next_token"), is_outline=True)
        if given is not None:
            saver(tmp_path, **given).install(outline, site)
        found: Tensor = site.objective(outline(rows["input_ids"]), rows)
        return found

    plain, least, most = (sum(ghost_step(module, lambda m, s=s: run(m, s)).kept) for s in settings)  # type: ignore[misc]
    assert least < 0.6 * plain
    assert plain * 0.95 <= most <= plain * 1.05, "all of it is in flight"
    assert not list(tmp_path.iterdir())
