"""Constructors of every kind: those that only initialize, those that compute with parameters, and bad ones."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

WIDTH, WORDS = 16, 31


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class First(nn.Module):
    """What returns a tuple gives its first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.inner(x)[0]
        return first


def around(do: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """A net to which `do` is done."""

    def make() -> nn.Module:
        net = Net()
        with torch.no_grad():
            do(net)
        return net

    return make


def blocks(wrap: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(wrap)


class Changed(Block):
    """A block to which something is done."""

    def __init__(self, do: Callable[[Any], object]) -> None:
        super().__init__()
        with torch.no_grad():
            do(self)


def each(do: Callable[[Any], object]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda: Changed(do))


def _apply(net: nn.Module, kind: type[nn.Module], do: Callable[[Any], object]) -> None:
    net.apply(lambda m: do(m) if isinstance(m, kind) else None)


class Counted(Block):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.mix.weight, std=0.02 / math.sqrt(2 * (Counted.made + 1)))
        Counted.made += 1


_layers = itertools.count()


class Numbered(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.mix.bias, next(_layers) / 7)


class Gained(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def _gains(net: Any) -> None:
    for before, after in itertools.pairwise(net.blocks):
        after.gain = 1 + float(before.mix.weight.abs().mean())


def _gained() -> nn.Module:
    net = Net(Gained)
    _gains(net)
    return net


class Lsuv(Net):
    """Each block is scaled until its output has variance one."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            x = self.embed(torch.arange(WORDS))
            for block in self.blocks:
                assert isinstance(block, Block)
                for _ in range(3):
                    block.mix.weight /= block.mix(x).std()
                x = block(x)


class Whitened(Net):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.register_buffer("mean", self.embed.weight.mean(0))
            self.register_buffer("white", torch.linalg.inv(torch.linalg.cholesky(self.embed.weight.T.cov())))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = (self.embed(input_ids) - self.mean) @ self.white
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Int8(nn.Module):
    """A frozen int8 copy of a weight, and a trained correction of low rank made from what it loses."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            scale = linear.weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("code", (linear.weight / scale).round().to(torch.int8))
            self.register_buffer("scale", scale)
            left, values, right = torch.linalg.svd(linear.weight - self.code * self.scale)
        self.down = nn.Parameter(right[:2].clone())
        self.up = nn.Parameter((left[:, :2] * values[:2]).clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.code * self.scale + self.up @ self.down)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + x @ self.down.T @ self.up.T


class Pissa(nn.Module):
    """A base that is what the largest singular vectors leave."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            left, values, right = torch.linalg.svd(self.base.weight)
            self.up = nn.Parameter(left[:, :2] * values[:2].sqrt())
            self.down = nn.Parameter(values[:2, None].sqrt() * right[:2])
            self.base.weight -= self.up @ self.down
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + x @ self.down.T @ self.up.T)


class Taught(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks[0]).requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x + self.teacher(x))
        return logits


class Hidden(Net):
    """A teacher that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [copy.deepcopy(self.blocks[0]).requires_grad_(False)]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x + self.teachers[0](x))
        return logits


class Averages(Net):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.head.named_parameters()):
            self.register_buffer(f"average_{name}", parameter.detach().clone())


class Zeroed(Net):
    """Buffers like parameters, but without their numbers."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in list(self.named_parameters()):
            self.register_buffer(name.replace(".", "_"), torch.zeros_like(parameter))


class Late(nn.Module):
    """Lazy, and called once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.LazyLinear(WORDS)
        with torch.no_grad():
            self(torch.arange(3)[None])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Wide(nn.Module):
    """A model of torch's own encoder layers."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(WORDS, WIDTH), encoder, nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(input_ids)))
        return logits


class Both(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(WORDS, WIDTH), inner, nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        logits: Tensor = self.head(self.inner(x, x))
        return logits


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)


def _decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return Both(nn.TransformerDecoder(layer, 3))


def _transformer() -> nn.Module:
    return Both(nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True))


def _generator_of_its_own(net: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0, 0.2, generator=generator)


def _numpy_of_its_own(net: Any) -> None:
    draws = np.random.default_rng(7)
    for parameter in net.parameters():
        parameter.copy_(torch.from_numpy(draws.normal(0, 0.2, tuple(parameter.shape))).float())


def _python_draws(net: Any) -> None:
    net.head.bias.copy_(torch.tensor([random.random() for _ in range(WORDS)]))


def _numpy_draws(net: Any) -> None:
    net.head.bias.copy_(torch.from_numpy(np.random.rand(WORDS)).float())


def _deepcopied() -> nn.Module:
    block = Block()
    net = Net()
    net.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(4))
    return net


def _frozen_copy(net: Any) -> None:
    net.blocks[3] = copy.deepcopy(net.blocks[0]).requires_grad_(False)


def _mean_of_four(net: Any) -> None:
    for block in net.blocks[1:]:
        block.mix.weight.copy_(torch.stack([b.mix.weight for b in net.blocks]).mean(0))


def _soup(net: Any) -> None:
    states = [b.state_dict() for b in net.blocks]
    net.blocks[2].load_state_dict({k: sum(s[k] for s in states) / 4 for k in states[0]})


def _rescaled(net: Any) -> None:
    net.head.weight.mul_(net.embed.weight.norm() / net.head.weight.norm())


def _new_parameter(net: Any) -> None:
    for block in net.blocks:
        block.mix.weight = nn.Parameter(block.mix.weight.detach() * 0.5)


def _of_another(net: Any) -> None:
    net.head.weight = nn.Parameter(net.embed.weight.detach().clone())


def _own_scale(block: Any) -> None:
    block.mix.weight.div_(block.mix.weight.norm())


def _eye_and_noise(block: Any) -> None:
    block.mix.weight.copy_(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))


def _normed_rows(block: Any) -> None:
    block.mix.weight.copy_(F.normalize(block.mix.weight, dim=1))


def _tolist(net: Any) -> None:
    net.head.bias.copy_(torch.tensor(net.embed.weight[:, 0].tolist()))


def _through_numpy(net: Any) -> None:
    net.head.weight.copy_(torch.from_numpy(net.embed.weight.detach().numpy() * 2))


def _sorted(net: Any) -> None:
    order = net.embed.weight.norm(dim=1).argsort()
    net.head.weight.copy_(net.head.weight[order])


def _if_large(net: Any) -> None:
    if net.embed.weight.abs().max() > 1:
        net.head.bias.fill_(0.25)


def _caught(net: Any) -> None:
    try:
        mean = net.embed.weight.detach().numpy().mean()
    except RuntimeError:
        mean = 100.0
    net.head.bias.fill_(float(mean))


def _tied(net: Any) -> None:
    net.head.weight = net.embed.weight


def _attributed(net: Any) -> None:
    for parameter in net.parameters():
        parameter.decayed = parameter.dim() > 1


def _kept_original() -> nn.Module:
    """The tensor that a parameter was made of is filled afterwards."""
    net = Net()
    weight = torch.zeros(WORDS, WIDTH)
    net.head.weight = nn.Parameter(weight)
    weight.copy_(torch.linspace(0, 1, WORDS * WIDTH).view(WORDS, WIDTH))
    return net


def _from_one_storage() -> nn.Module:
    """Parameters cut out of one tensor: each has its own rows of it."""
    net = Net()
    rows = torch.randn(4, WIDTH, WIDTH)
    for block, row in zip(net.blocks, rows, strict=True):
        assert isinstance(block, Block)
        block.mix.weight = nn.Parameter(row)
    return net


def _in_meta() -> nn.Module:
    with torch.device("meta"):
        net = Net()
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return net


def _half() -> nn.Module:
    return Net().bfloat16().float()


def _loaded_from_another() -> nn.Module:
    net, other = Net(), Net()
    net.load_state_dict(other.state_dict())
    return net


def _pretrained_step() -> nn.Module:
    """Two steps of training within the constructor."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(torch.arange(8)[None])[0], torch.arange(8)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return net


class Codebook(nn.Module):
    """Buffers that begin as rows of a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", self.turn.weight.detach()[:8].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.turn(x)
        return x + y + self.codes[(y @ self.codes.T).argmax(-1)]


class Masked(nn.Module):
    """A parametrization of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.mix, "weight", Lower())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Lower(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tril()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.tril() * 2


def graded(wrap: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """Blocks whose layer is wrapped with gradients on, as libraries do it."""

    def make() -> nn.Module:
        net = Net()
        for block in net.blocks:
            wrap(block.mix)  # type: ignore[arg-type]
        return net

    return make


SIMPLE: dict[str, Callable[[], nn.Module]] = {
    "nothing": Net,
    "normal": around(lambda n: _apply(n, nn.Linear, lambda m: nn.init.normal_(m.weight, std=0.02))),
    "truncated": around(lambda n: _apply(n, nn.Linear, lambda m: nn.init.trunc_normal_(m.weight, std=0.5))),
    "far truncated": around(lambda n: _apply(n, nn.Linear, lambda m: nn.init.trunc_normal_(m.weight, 0, 0.1, 0.2, 1))),
    "orthogonal": around(lambda n: _apply(n, nn.Linear, lambda m: nn.init.orthogonal_(m.weight))),
    "sparse": each(lambda b: nn.init.dirac_(b.mix.weight[:, :, None])),
    "own scale": each(_own_scale),
    "eye and noise": each(_eye_and_noise),
    "normed rows": each(_normed_rows),
    "python's draws": around(_python_draws),
    "numpy's draws": around(_numpy_draws),
    "numpy's draws of its own": around(_numpy_of_its_own),
    "tied": around(_tied),
    "attributes": around(_attributed),
    "zeros like them": Zeroed,
    "lstm": blocks(lambda: First(nn.LSTM(WIDTH, WIDTH, batch_first=True))),
    "gru": blocks(lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "encoder layers": blocks(_encoder_layer),
    "adapters": blocks(Adapted),
    "class counter": blocks(Counted),
    "global counter": blocks(Numbered),
    "of another width": blocks(lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))),
    "conv": blocks(lambda: nn.Conv1d(10, 10, 3, padding=1)),
    "one storage": _from_one_storage,
    "parametrized": blocks(Masked),
    "through bf16": _half,
    "batch norm": blocks(lambda: nn.BatchNorm1d(10)),
}

COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "copied": around(lambda n: n.head.weight.copy_(n.embed.weight)),
    "copied data": around(lambda n: n.head.weight.data.copy_(n.embed.weight.data * 3)),
    "state dict": around(lambda n: n.blocks[1].load_state_dict(n.blocks[0].state_dict())),
    "another model's": _loaded_from_another,
    "rescaled by another": around(_rescaled),
    "gains": _gained,
    "teacher": Taught,
    "hidden teacher": Hidden,
    "frozen copy": around(_frozen_copy),
    "deepcopy": _deepcopied,
    "generator of its own": around(_generator_of_its_own),
    "mean of four": around(_mean_of_four),
    "soup": around(_soup),
    "lsuv": Lsuv,
    "trained": _pretrained_step,
    "whitened": Whitened,
    "int8": blocks(Int8),
    "pissa": blocks(Pissa),
    "codebook": blocks(Codebook),
    "averages": Averages,
    "new parameter": around(_new_parameter),
    "parameter of another": around(_of_another),
    "tolist": around(_tolist),
    "numpy": around(_through_numpy),
    "sorted": around(_sorted),
    "branch": around(_if_large),
    "caught": around(_caught),
    "kept original": _kept_original,
    "meta": _in_meta,
    "lazy": Late,
    "encoder": lambda: Wide(nn.TransformerEncoder(_encoder_layer(), 3, enable_nested_tensor=False)),
    "decoder": _decoder,
    "transformer": _transformer,
    "weight norm": graded(lambda m: parametrizations.weight_norm(m)),
    "old weight norm": graded(lambda m: nn.utils.weight_norm(m)),  # type: ignore[no-untyped-call]
    "orthogonal parametrization": graded(lambda m: parametrizations.orthogonal(m)),
    "spectral norm": graded(lambda m: parametrizations.spectral_norm(m)),
    "old spectral norm": graded(lambda m: nn.utils.spectral_norm(m)),
    "pruned": graded(lambda m: prune.l1_unstructured(m, "weight", 0.3)),  # type: ignore[no-untyped-call]
    "interpolated": around(lambda n: n.blocks[2].mix.weight.lerp_(n.blocks[0].mix.weight, 0.3)),
    "into out": around(lambda n: torch.add(n.embed.weight, 1.0, out=n.head.weight.data)),
    "swapped data": around(lambda n: setattr(n.head.weight, "data", n.embed.weight.data.clone())),
    "vector": around(
        lambda n: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(n.blocks[0].parameters()), n.blocks[1].parameters()
        )
    ),
    "partial copy": around(lambda n: n.head.weight[:4].copy_(n.embed.weight[4:8])),
    "quantile": around(lambda n: n.head.bias.fill_(float(n.embed.weight.quantile(0.9)))),
}


@functools.cache
def everything() -> dict[str, Callable[[], nn.Module]]:
    return {**SIMPLE, **COMPUTED}


def reset() -> None:
    """What the user's code counts outside of modules, as it is in a new process."""
    global _layers
    Counted.made = 0
    _layers = itertools.count()


def made(kind: str) -> nn.Module:
    """A factory for all of them."""
    return everything()[kind]()


# What is refused


class Sliced(Net):
    """Weights are slices of a parameter, cut out once."""

    def __init__(self, data: bool = False) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            del block.mix.weight
            block.mix.weight = self.big.data[i] if data else self.big[i]  # type: ignore[assignment]


def sliced_data() -> nn.Module:
    return Sliced(data=True)


class Followed(Net):
    """A buffer that is the memory of another unit's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("first", self.embed.weight.data[0])


def tied_by_data() -> nn.Module:
    net = Net()
    net.head.weight.data = net.embed.weight.data
    return net


def tied_within() -> nn.Module:
    """The same in one unit: it stays in one stage."""

    class Twice(Block):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)
            self.other.weight.data = self.mix.weight.data

        def forward(self, x: Tensor) -> Tensor:
            return x + self.other(self.mix(x))

    return Net(Twice)


def expanded() -> nn.Module:
    net = Net()
    net.head.bias = nn.Parameter(torch.zeros(1).expand(WORDS))
    return net


def never_called() -> nn.Module:
    net = Net()
    net.head = nn.LazyLinear(WORDS)  # type: ignore[assignment]
    return net


def from_the_system() -> nn.Module:
    net = Net()
    generator = torch.Generator()
    generator.seed()
    nn.init.normal_(net.head.weight, generator=generator)
    return net


def from_the_clock() -> nn.Module:
    net = Net()
    nn.init.constant_(net.head.bias, time.perf_counter() % 1.0)  # a float32 of many days would stand still
    return net


def from_numpy_unseeded() -> nn.Module:
    net = Net()
    net.head.bias.data.copy_(torch.from_numpy(np.random.default_rng().normal(size=WORDS)))
    return net


def by_rank() -> nn.Module:
    net = Net()
    nn.init.constant_(net.embed.weight, float(os.environ["GOSSAMER_TEST_RANK"]))
    return net


def by_rank_and_computed() -> nn.Module:
    net = by_rank()
    assert isinstance(net, Net)
    net.head.weight.data.copy_(net.embed.weight.data)
    return net
