"""Transfers: what crosses a link equals what its meaning says, forward and backward, in as many bytes as priced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from exchange.transfer_jobs import play, rows_of, shuffle, uncut, weigh
from gossamer.comm.channel import carry
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import codec as codecs
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.exchange.codec.float32 import Float32
from gossamer.exchange.codec.int8 import Int8
from gossamer.p2p import ActivationCodec, RowAllToAll, RowSplits, StageLink, TensorSpec
from gossamer.p2p import activation as crossings
from gossamer.p2p.activation.codec import CodecCompression
from gossamer.p2p.activation.none import NoCompression
from gossamer.p2p.activation.topk import TopKCompression
from gossamer.spec.errors import BadInput, WireMismatch

LEVELS = ProcessGroups.flat(2)
LOSSY: list[Any] = [
    {"codec": {"codec": "int8"}},
    {"codec": {"codec": {"int8": {"stochastic": True}}, "return_codec": "float32"}},
    {"topk": {"fraction": 0.25}},
    {"topk": {"fraction": 0.02, "per_row": False}},
    {"topk": {"fraction": 0.25, "masked": False}},
    {"topk": {"fraction": 0.25, "values": "int8"}},
]
FORMS = [(), (0,), (1,), (3, 0), (0, 5), (7,), (4, 33), (2, 5, 64), (1, 40_000)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def link(crossing: ActivationCodec) -> StageLink:
    return StageLink(source=0, target=1, levels=LEVELS, crossing=crossing)


def cross(crossing: ActivationCodec, x: Tensor, gradient: Tensor | None, batch: int = 0) -> tuple[Tensor, Tensor, list]:
    """There and back in lockstep: what arrived, its gradient, and both channels."""
    channels = LocalChannel.world(2)
    sender, receiver = (link(crossing).passage(TensorSpec.of(x), (1, 2, batch)) for _ in range(2))
    carry(channels[0], sender.send(x))
    arrived = carry(channels[1], receiver.receive()).mean
    carry(channels[1], receiver.send_gradient(gradient))
    return arrived, carry(channels[0], sender.receive_gradient()).mean, channels


def in_threads(job: Any, ranks: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(job, range(ranks), LocalChannel.world(ranks, patience_s=20.0)))


def agree(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for mine, meant in zip(found, wanted, strict=True):
        assert mine["gradients"] == meant["gradients"]
        assert mine["loss"] == meant["loss"]
        assert mine["sent"] == mine["priced"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plain_pipeline_equals_the_uncut_model_bit_for_bit(pool, ranks: int, dtype: str) -> None:
    found = pool.run("exchange.transfer_jobs:pipeline", ranks, crossing="none", dtype=dtype)
    agree(found, uncut(ranks, crossing="none", dtype=dtype))
    assert found[0]["loss"] == 0 != found[-1]["loss"]


def test_the_loss_free_setting_is_the_plain_pipeline() -> None:
    whole = uncut(3, crossing={"topk": {"fraction": 1.0}})
    assert whole == uncut(3, crossing="none") == uncut(3, crossing={"codec": {"codec": "float32"}})


@pytest.mark.parametrize("crossing", LOSSY, ids=str)
def test_a_lossy_pipeline_equals_its_meaning_in_one_process(pool, crossing: Any) -> None:
    """Over gloo, and in threads over lockstep; every byte as priced before the step."""
    wanted = uncut(3, crossing=crossing)
    agree(pool.run("exchange.transfer_jobs:pipeline", 3, crossing=crossing), wanted)
    agree(in_threads(partial(play, crossing=crossing), 3), wanted)
    assert wanted != uncut(3, crossing="none"), "nothing was lost: the test compares nothing"


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize("crossing", ["none", *LOSSY], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_form_crosses_in_the_bytes_that_were_priced(crossing: Any, shape: tuple[int, ...], dtype: Any) -> None:
    one, x, g = crossings.build(crossing), gaussian(*shape).to(dtype), gaussian(*shape, seed=1).to(dtype)
    arrived, gradient, channels = cross(one, x, g)
    for y in (arrived, gradient):
        assert y.shape == x.shape and y.dtype == dtype
    assert arrived.requires_grad and arrived.is_leaf
    way = link(one)
    for rank, back in ((0, False), (1, True)):
        traffic = way.traffic(TensorSpec.of(x), rank, back=back)
        assert channels[rank].meter.total_bytes == traffic.nbytes
        assert way.traffic(TensorSpec.of(x), 1 - rank, back=back).nbytes == 0
        assert sum(way.traffic(TensorSpec.of(x), 1 - rank, back=back).arriving or ()) == traffic.nbytes
    meant = x.clone().requires_grad_()
    y = way.passage(TensorSpec.of(x), (1, 2, 0)).through(meant)
    y.backward(g)
    assert torch.equal(y, arrived) and meant.grad is not None and torch.equal(meant.grad, gradient)


@pytest.mark.parametrize("crossing", ["none", *LOSSY], ids=str)
def test_strided_tensors_cross_like_their_copies(crossing: Any) -> None:
    one, x = crossings.build(crossing), gaussian(40, 3, 16).transpose(0, 1)
    before = x.clone()
    assert torch.equal(cross(one, x, x)[0], cross(one, x.contiguous(), x)[0])
    assert torch.equal(x, before), "sending changed the tensor"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.int8, torch.float16])
def test_plain_carries_every_type(dtype: torch.dtype) -> None:
    x = (gaussian(5, 7) * 3).to(dtype)
    arrived, _, _ = cross(NoCompression(), x, None)
    assert torch.equal(arrived, x) and arrived.dtype == dtype
    assert arrived.requires_grad == dtype.is_floating_point


def test_loss_free_means_every_bit() -> None:
    x = torch.tensor([[-0.0, 1e-42, float("inf"), float("nan"), -3.0]])
    for one in (NoCompression(), TopKCompression(fraction=1.0), CodecCompression(Float32())):
        assert one.lossless
        for y in cross(one, x, x)[:2]:
            assert torch.equal(y.view(torch.int32), x.view(torch.int32))
    assert (
        not TopKCompression(fraction=1.0, values=Int8()).lossless
        and not CodecCompression(Float32(), return_codec=Int8()).lossless
    )


def test_int8_activations_and_gradients_are_off_by_half_a_step_at_most() -> None:
    x, g = gaussian(8, 512) * 5, gaussian(8, 512, seed=1) * 1e-4
    arrived, gradient, channels = cross(CodecCompression(Int8()), x, g)
    for got, sent in ((arrived.detach(), x), (gradient, g)):
        step = sent.view(-1, 256).abs().amax(-1, keepdim=True) / 127
        off = (got - sent).view(-1, 256).abs() / step
        assert 0.4 < float(off.max()) < 0.5001
    assert 3.9 < x.numel() * 4 / channels[0].meter.total_bytes < 4


def test_random_numbers_depend_on_seed_step_batch_and_direction() -> None:
    one, x = CodecCompression(Int8(stochastic=True)), gaussian(1000)
    form, way = TensorSpec.of(x), link(one)
    seen = [cross(one, x, x)[0], cross(one, x, x)[1], cross(one, x, x, batch=1)[0]]
    seen += [way.passage(form, at).through(x) for at in ((2, 2, 0), (1, 3, 0))]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert torch.equal(seen[0], cross(one, x, x)[0])


def test_what_is_not_finite_is_not_hidden() -> None:
    for crossing in LOSSY:
        for bad in (float("nan"), float("inf")):
            x = gaussian(4, 100)
            x[2, 3] = bad
            assert not bool(torch.isfinite(cross(crossings.build(crossing), x, None)[0]).all())


# ---- top-k


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.8])
def test_the_largest_entries_cross_and_their_gradients_come_back(per_row: bool, fraction: float) -> None:
    x, g = gaussian(6, 200), gaussian(6, 200, seed=1)
    rows = x if per_row else x.view(1, -1)
    k = round(fraction * rows.shape[-1])
    mask = torch.zeros_like(rows).scatter_(-1, rows.abs().argsort(-1, descending=True)[:, :k], 1.0).view_as(x)
    arrived, gradient, channels = cross(TopKCompression(fraction=fraction, per_row=per_row), x, g)
    assert torch.equal(arrived, x * mask)
    assert torch.equal(gradient, g * mask)
    values, entries = 4 * k * rows.shape[0], x.numel()
    assert channels[0].meter.total_bytes == values + min(2 * k * rows.shape[0], entries // 8)
    assert channels[1].meter.total_bytes == values, "places were sent back"


def test_straight_through_sends_the_gradients_own_largest_entries() -> None:
    x, g = gaussian(6, 200), gaussian(6, 200, seed=1)
    one = TopKCompression(fraction=0.1, masked=False)
    _, gradient, channels = cross(one, x, g)
    assert torch.equal(gradient, cross(one, g, g)[0])
    assert channels[1].meter.total_bytes == channels[0].meter.total_bytes


def test_masked_top_k_passes_gradcheck_through_encode_and_decode() -> None:
    x = gaussian(3, 4, 16).double().requires_grad_()
    for per_row in (True, False):
        passage = link(TopKCompression(fraction=0.25, per_row=per_row)).passage(TensorSpec.of(x), (0, 0, 0))
        assert torch.autograd.gradcheck(passage.through, (x,))
    straight = link(TopKCompression(fraction=0.25, masked=False)).passage(TensorSpec.of(x), (0, 0, 0))
    assert not torch.autograd.gradcheck(straight.through, (x,), raise_exception=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_of_equal_entries_the_first_cross(fraction: float, dtype: torch.dtype) -> None:
    """A row of nothing but zeros, one with fewer others than may cross, one of equals, one with what is not finite."""
    x = torch.zeros(4, 40, dtype=dtype)
    x[1, 30], x[2] = -2.0, 0.5
    x[3] = torch.arange(40)
    x[3, :2] = torch.tensor([float("nan"), -float("inf")])
    k = int(40 * fraction)
    arrived, gradient, _ = cross(TopKCompression(fraction=fraction), x, torch.ones_like(x))
    assert torch.equal(gradient.count_nonzero(-1), torch.full((4,), k))
    assert gradient[0, :k].all() and gradient[2, :k].all() and gradient[1, : k - 1].all()
    assert arrived[1, 30] == -2 and arrived[3, 0].isnan() and arrived[3, 1] == -float("inf")
    assert torch.equal(arrived[3, 42 - k :], x[3, 42 - k :])


def test_wide_rows_have_wide_places() -> None:
    x = gaussian(2, (1 << 15) + 9)
    x[1, -1] = 100.0
    arrived = cross(TopKCompression(fraction=0.001), x, None)[0]
    assert arrived[1, -1] == 100 and int(arrived.count_nonzero()) == 66
    assert TopKCompression(fraction=0.001).nbytes(TensorSpec.of(x)) == 66 * 8


# ---- bad input


@dataclass(frozen=True, slots=True)
class Elastic(Float32):
    """A codec whose messages are as long as they need to be."""

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(fixed_size=False)


def test_what_cannot_cross_is_refused_when_it_is_planned() -> None:
    with pytest.raises(BadInput, match="fraction"):
        TopKCompression(fraction=0)
    for refused in (
        CodecCompression,
        lambda c: CodecCompression(Int8(), return_codec=c),
        lambda c: TopKCompression(values=c),
    ):
        with pytest.raises(BadInput, match="messages have a fixed size"):
            refused(Elastic())
    with pytest.raises(BadInput, match="messages have a fixed size"):
        RowAllToAll(rank=0, levels=LEVELS, back=Elastic())
    for one in (CodecCompression(Int8()), TopKCompression()):
        with pytest.raises(BadInput, match="fp32, bf16 or fp16 tensors"):
            link(one).passage(TensorSpec((3,), torch.int64), (0, 0, 0))
    with pytest.raises(BadInput, match="fp32, bf16 or fp16 tensors"):
        link(CodecCompression(Int8())).passage(TensorSpec((3,), torch.float64), (0, 0, 0))
    islands = ProcessGroups.islands([[0, 1], [2, 3]])
    for target in (0, 2):
        with pytest.raises(BadInput, match="choose the target of rank 0 from \\[1\\]"):
            StageLink(source=0, target=target, levels=islands, level="island")


def test_a_tensor_that_was_not_promised_is_refused() -> None:
    passage = link(NoCompression()).passage(TensorSpec((3, 2), torch.float32), (0, 0, 0))
    for x in (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bfloat16)):
        with pytest.raises(WireMismatch, match=r"wanted a tensor \(3, 2\) torch\.float32, as the receiver expects"):
            next(passage.send(x))


def test_no_gradient_is_a_gradient_of_zeros() -> None:
    for crossing in ("none", *LOSSY):
        assert not cross(crossings.build(crossing), gaussian(4, 9), None)[1].any()


# ---- rows


def dense(ranks: int, case: str, codec: Codec | None, dtype: torch.dtype) -> list[dict[str, Any]]:
    """All rows in one matrix, moved by a permutation, with autograd."""
    given = [rows_of(r, ranks, case, dtype) for r in range(ranks)]
    xs = [x.requires_grad_() for x, _ in given]
    wires = [RowAllToAll(rank=r, levels=ProcessGroups.flat(ranks), codec=codec) for r in range(ranks)]
    pieces = [torch.split(_Coded.apply(x, w, 0), s) for (x, s), w in zip(given, wires, strict=True)]
    there = [torch.cat([p[me] for p in pieces]) for me in range(ranks)]
    returned = [
        torch.split(_Coded.apply(y * 2, w, 1), [s[r] for _, s in given])
        for r, (y, w) in enumerate(zip(there, wires, strict=True))
    ]
    home = [torch.cat([p[me] for p in returned]) for me in range(ranks)]
    torch.stack([weigh(there[r], r) + weigh(home[r], r) for r in range(ranks)]).sum().backward()
    return [
        {"there": there[r].tolist(), "home": home[r].tolist(), "gradient": xs[r].grad.tolist()} for r in range(ranks)
    ]


class _Coded(torch.autograd.Function):
    """Rows through a codec and back, and so their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: RowAllToAll, turn: int) -> Tensor:
        ctx.codec = wire.codec
        return x.clone() if wire.codec is None else _coded(wire.codec, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient if ctx.codec is None else _coded(ctx.codec, gradient)), None, None


def _coded(codec: Codec, x: Tensor) -> Tensor:
    if not x.numel():
        return x.clone()
    key, rows = codecs.Key(0, 0), x.reshape(x.shape[0], -1).float()
    return codec.decode(codec.encode(rows.contiguous(), key), rows.shape[-1], key).view(x.shape).to(x.dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("case", "codec", "dtype"),
    [
        ("plenty", None, "float32"),
        ("sparse", None, "float32"),
        ("none", None, "float32"),
        ("strided", "int8", "float32"),
        ("plenty", "int8", "bfloat16"),
        ("sparse", None, "bfloat16"),
    ],
)
def test_uneven_rows_move_like_a_permutation_of_all(pool, ranks: int, case: str, codec: Any, dtype: str) -> None:
    one = None if codec is None else codecs.build(codec)
    wanted = dense(ranks, case, one, getattr(torch, dtype))
    arguments = {"case": case, "codec": codec, "dtype": dtype}
    over_gloo = pool.run("exchange.transfer_jobs:rows", ranks, **arguments)
    for found in (over_gloo, in_threads(partial(shuffle, **arguments), ranks)):
        for rank, (mine, meant) in enumerate(zip(found, wanted, strict=True)):
            for what in ("there", "home", "gradient"):
                assert mine[what] == meant[what], f"{what} of rank {rank}"
            assert mine["sent"] == mine["priced"]


def test_rows_that_do_not_fit_their_split_are_refused() -> None:
    wire, run = RowAllToAll(rank=0, levels=LEVELS), partial(carry, LocalChannel.world(2)[0])
    with pytest.raises(WireMismatch, match=r"wanted a tensor of 4 rows.*got 3 rows"):
        wire(torch.zeros(3, 2), RowSplits((1, 3), (0, 0)), at=(0,), carry=run)
    with pytest.raises(WireMismatch, match="each of the 2 ranks of the process group, got counts for 3 ranks"):
        wire.agree([1, 1, 1], run)


# ---- many, and lost ones


def test_64_transfers_each_way_in_any_order_of_arrival(pool) -> None:
    assert pool.run("exchange.transfer_jobs:crowd", 2, jobs=64) == [[], []]


@pytest.mark.parametrize("dies", [False, True])
def test_a_lost_peer_fails_what_waits_for_it_and_nothing_hangs(pool, dies: bool) -> None:
    said = pool.attempt("exchange.transfer_jobs:lost_peer", 2, dies=dies)[0]["result"]
    assert set(said) == {"0", "1", "2", "finish", "bytes"}
    assert "rank 0 lost a peer among ranks [0, 1] during shuffle" in said["0"]
    assert "rank 0 lost a peer among ranks [0, 1] during shuffle" in said["2"]  # the first failure, whichever it was
    assert said["bytes"] == "1200000", "nothing may be started on a wire that lost a peer"
