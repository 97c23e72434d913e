from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossamer.spec.errors import BadInput, CheckpointMismatch
from gossamer.store.checkpoint import CheckpointSource, latest_good, list_checkpoints, open_checkpoint, set_aside
from store.crew import good, halves, model, save, whole


def test_any_layout_is_read_from_any_other(tmp_path: Path) -> None:
    tensors = model()
    good(save(tmp_path, 1, halves(tensors)))
    checkpoint = open_checkpoint(tmp_path, 1)
    assert checkpoint.ranks == 2 and checkpoint.names() == tuple(sorted(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
        last = tensor.dim() - 1
        third = max(tensor.shape[last] // 3, 1)
        for low in range(0, tensor.shape[last], third):
            wanted = tensor.narrow(last, low, min(third, tensor.shape[last] - low))
            start = (0,) * last + (low,)
            assert torch.equal(checkpoint.read(name, start, tuple(wanted.shape)), wanted)


def test_a_region_goes_into_a_given_tensor_in_its_own_dtype(tmp_path: Path) -> None:
    tensors = model()
    good(save(tmp_path, 1, halves(tensors)))
    checkpoint = open_checkpoint(tmp_path, 1)
    room = torch.zeros(8, 8, dtype=torch.float64)
    out = room[1:4, ::2][:, :3]  # not contiguous
    assert checkpoint.read("embed.weight", (5, 2), (3, 3), out=out) is out
    assert torch.equal(out, tensors["embed.weight"][5:8, 2:5].double())
    assert room.count_nonzero() == 9
    with pytest.raises(BadInput, match=r"shape \(12, 6\)"):
        checkpoint.read("embed.weight", out=torch.zeros(3))


def test_state_that_differs_per_rank_keeps_its_owner(tmp_path: Path) -> None:
    ranks = [[whole("residual", torch.full((4 + rank,), float(rank)), rank)] for rank in range(3)]
    ranks[0].append(whole("w", torch.ones(2)))
    good(save(tmp_path, 1, ranks))
    checkpoint = open_checkpoint(tmp_path, 1)
    assert checkpoint.replicas("residual") == (0, 1, 2) and checkpoint.replicas("w") == (-1,)
    for rank in range(3):
        assert torch.equal(checkpoint.read("residual", replica=rank), torch.full((4 + rank,), float(rank)))
    with pytest.raises(BadInput, match=r"replica 3 of residual, got replicas \(0, 1, 2\)"):
        checkpoint.read("residual", replica=3)


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
)  # fmt: skip


def test_every_dtype_and_odd_shapes_come_back_bit_for_bit(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    given = {}
    for dtype in DTYPES:
        for shape in ((), (1,), (0,), (3, 0, 2), (7,), (3, 5)):
            name = f"{dtype} {shape}"
            bits = torch.randint(0, 2, shape, generator=random)
            given[name] = bits.to(torch.float32).to(dtype) if dtype.is_floating_point else bits.to(dtype)
    given["transposed"] = torch.randn(4, 6, generator=random).t()
    given["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    given['needs "quotes" / and [brackets]@'] = torch.nn.Parameter(torch.ones(2))
    good(save(tmp_path, 1, [[whole(name, tensor) for name, tensor in given.items()]]))
    checkpoint = open_checkpoint(tmp_path, 1)
    checkpoint.verify()
    for name, tensor in given.items():
        got = checkpoint.read(name)
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(_bits(got), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_meta_of_every_rank_comes_back(tmp_path: Path) -> None:
    meta = {"step": 3, "position": {"index": 2**60, "seed": 0.1}, "rng": [1, None, True, "text"]}
    good(save(tmp_path, 3, halves(model()), meta))
    checkpoint = open_checkpoint(tmp_path, 3)
    assert checkpoint.meta == meta and checkpoint.rank_meta(1) == meta


def test_shards_are_ordinary_safetensors_files(tmp_path: Path) -> None:
    tensors = model()
    good(save(tmp_path, 1, [[whole(name, tensor) for name, tensor in tensors.items()]]))
    loaded = load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_only_touched_shards_are_opened(tmp_path: Path) -> None:
    tensors = model()
    good(save(tmp_path, 1, halves(tensors)))
    (tmp_path / "step-00000001" / "rank-00001.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path, 1)
    assert torch.equal(checkpoint.read("embed.weight", (0, 0), (6, 6)), tensors["embed.weight"][:6])
    with pytest.raises(CheckpointMismatch, match="rank-00001"):
        checkpoint.read("embed.weight", (5, 0), (2, 6))


def test_a_checkpoint_of_another_model_is_told_by_names_and_counts(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in model().items()}
    good(save(tmp_path, 1, [[whole(n, t) for n, t in tensors.items()] + [whole("optimizer.x", torch.zeros(1))]]))
    source = CheckpointSource(open_checkpoint(tmp_path, 1))
    expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    source.check_against(expected, elsewhere=lambda name: not name.startswith("model."))
    with pytest.raises(CheckpointMismatch, match=r"1 not wanted \(first: optimizer\.x\)"):
        source.check_against(expected, elsewhere=lambda name: False)
    expected["model.cube"] = ((4, 3, 7), torch.float32)
    expected["model.new"] = expected["model.newer"] = ((1,), torch.float32)
    del expected["model.layer.bias"]
    with pytest.raises(CheckpointMismatch) as caught:
        source.check_against(expected, elsewhere=lambda name: not name.startswith("model."))
    for part in (
        "of 5 tensors wanted and 4 stored",
        "2 missing (first: model.new)",
        "1 not wanted (first: model.layer.bias)",
        "1 of another shape or dtype (first: model.cube: float32 (4, 3, 6), wanted float32 (4, 3, 7))",
    ):
        assert part in str(caught.value)


def test_wrong_questions_are_answered(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no checkpoint in"):
        open_checkpoint(tmp_path / "nowhere", 1)
    good(save(tmp_path, 1, halves(model())))
    with pytest.raises(BadInput, match="steps 1 in"):
        open_checkpoint(tmp_path, 2)
    checkpoint = open_checkpoint(tmp_path, 1)
    with pytest.raises(BadInput, match=r"did you mean 'layer\.weight'"):
        checkpoint.read("layer.wieght")
    for start, size in (((0, 0), (13, 1)), ((0,), (1,)), ((-1, 0), (1, 1))):
        with pytest.raises(BadInput, match="is not inside shape"):
            checkpoint.read("embed.weight", start, size)


def test_a_bad_one_is_set_aside(tmp_path: Path) -> None:
    for step in (1, 2):
        good(save(tmp_path, step, halves(model(step))))
    assert set_aside(tmp_path, 2).name == "step-00000002.aside-0"
    assert list_checkpoints(tmp_path) == (1,)
    good(save(tmp_path, 2, halves(model(2))))
    assert set_aside(tmp_path, 2).name == "step-00000002.aside-1"
    found, problems = latest_good(tmp_path)
    assert found.step == 1 and problems == {}
    with pytest.raises(BadInput, match="step 2"):
        set_aside(tmp_path, 2)
