"""The saver cut_cross_entropy: models whose loss it cuts, equal to plain training; those that it refuses by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.loss.next_token import NextToken
from gossamer.model.forward_adapter import caller_of
from gossamer.model.split.recompute import nothing_saved
from gossamer.saver import Installed, Site
from gossamer.saver import build as saver
from gossamer.saver.head.unmade_logits import UnmadeLogits
from gossamer.spec.errors import BadInput

V, D, T = 97, 16, 12
SMALL: Mapping[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8, "sliding_window": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "mixtral": {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}


class Plain(nn.Module):
    """A model of a user's: logits from its last linear module, with a bias; `end` does what it wants with them."""

    def __init__(self, end: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.end = end

    def forward(self, tokens: Tensor) -> Any:
        return self.end(self.head(torch.tanh(self.inner(self.embed(tokens)))))


def _model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **MODELS[kind]})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def _batch() -> dict[str, Tensor]:
    tokens = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[1, 3:6] = -100
    return {"input_ids": tokens, "labels": labels}


def _site(**fields: Any) -> Site:
    return Site(units=(), objective=NextToken(), batch=_batch(), **fields)


def _installed(module: nn.Module, method: Any = "cut_cross_entropy", **fields: Any) -> Installed:
    return saver(method).install(module, _site(**fields))


def _loss(module: nn.Module) -> Tensor:
    batch = _batch()
    return NextToken()(caller_of(module, batch)(module, batch), batch)


def _all(module: nn.Module) -> dict[str, Tensor]:
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    found = torch.autograd.grad(loss := _loss(module), list(trained.values()), allow_unused=True)
    return {"loss": loss.detach(), **{n: g for n, g in zip(trained, found, strict=True) if g is not None}}


def _equal(module: nn.Module, plain: nn.Module) -> None:
    ours, wanted = _all(module), _all(plain)
    assert ours.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (ours[name] - one).abs().max() <= 1e-5 * max(float(one.abs().max()), 1e-3), name


WAYS = ("cut_cross_entropy", {"cut_cross_entropy": {"gradients": "backward"}}, {"cut_cross_entropy": {"by": "torch"}})


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str, method: Any) -> None:
    """Soft caps, scales, tied heads and a loss with a term of the experts' own: all is the model's own code."""
    module = _model(kind)
    plain = copy.deepcopy(module)
    there = _installed(module, method)
    assert isinstance(module(**_batch()).logits, UnmadeLogits)
    _equal(module, plain)
    there.remove()
    assert type(module(**_batch()).logits) is Tensor


@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        lambda logits: logits,
        lambda logits: {"logits": logits * 2 / 3},
        lambda logits: (7.0 * torch.tanh(logits / 7.0), "more"),
        lambda logits: 0.5 * logits.float()[:, :].contiguous(),
    ],
)
def test_a_plain_module(end: Callable[[Tensor], Any], stages: bool) -> None:
    module = Plain(end)
    plain = copy.deepcopy(module)
    _installed(module, in_stages=stages)
    _equal(module, plain)


def test_evaluation_samples_and_metrics_get_logits() -> None:
    module = Plain(lambda logits: torch.tanh(logits / 3) * 3)
    plain = copy.deepcopy(module)
    _installed(module)
    tokens = _batch()["input_ids"]
    with torch.no_grad():
        ours, wanted = module.eval()(tokens), plain.eval()(tokens)
        assert torch.equal(ours.argmax(-1), wanted.argmax(-1))
        assert torch.equal(ours[0, -1].softmax(-1), wanted[0, -1].softmax(-1))
        assert torch.equal(ours[0][2].float().cpu(), wanted[0][2])
        assert torch.equal(ours[..., :5], wanted[..., :5]) and ours.tolist() == wanted.tolist()
        assert torch.allclose(ours.logsumexp(-1), wanted.logsumexp(-1), atol=1e-6)
        assert abs(float(_loss(module)) - float(_loss(plain))) < 1e-6


def test_logits_that_code_below_python_reads_have_their_gradient() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * gradient

    module = Plain(lambda logits: Square.apply(torch.tanh(logits * 0.5)[:, 1:]).mean())
    plain = copy.deepcopy(module)
    with pytest.raises(BadInput, match="needed otherwise"):
        _installed(module)
    watch = _installed(module, is_outline=True)
    _equal(module, plain)
    watch.remove()


def test_logits_after_their_head_has_changed() -> None:
    module = Plain()
    _installed(module)
    logits = module(_batch()["input_ids"])
    with torch.no_grad():
        module.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="after the head or its input has changed"):
        logits.sum()


def test_a_frozen_head_and_bf16_autocast() -> None:
    module = Plain()
    module.head.requires_grad_(False)
    plain = copy.deepcopy(module)
    _installed(module)
    _equal(module, plain)
    with torch.autocast("cpu", torch.bfloat16):
        ours, wanted = _all(module), _all(plain)
    assert module(_batch()["input_ids"]).dtype is torch.float32
    assert abs(float(ours["loss"] - wanted["loss"])) < 1e-3
    assert all((ours[n] - one).abs().max() <= 0.02 * one.abs().max() for n, one in wanted.items())


def test_what_the_log_says() -> None:
    told = _installed(Plain(), rows=400).told
    assert "the loss of 12000 tokens over 97 words (head) takes" in told and "with all logits" in told


def test_logits_needed_otherwise_in_a_stage() -> None:
    module = Plain(lambda logits: logits + logits.mean())
    _installed(module, in_stages=True)
    with pytest.raises(BadInput, match=r"needed otherwise.*mean"):
        _loss(module)


def test_a_stage_that_keeps_no_graph_is_compared_too() -> None:
    module = Plain()
    plain = copy.deepcopy(module)
    _installed(module, in_stages=True)
    with nothing_saved():
        assert abs(float((_loss(module) - _loss(plain)).detach())) < 1e-6
    _equal(module, plain)


class _OwnHead(nn.Linear):
    """A head that does more than its product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "end, why",
    [
        (lambda logits: F.log_softmax(logits, -1), "needed otherwise.*log_softmax"),
        (lambda logits: logits + logits.mean(), "needed otherwise.*mean"),
        (lambda logits: logits.mul_(2.0), "changes its logits in place .mul_"),
        (lambda logits: torch.tanh(torch.tanh(logits)), "needed otherwise.*tanh"),
        (lambda logits: torch.zeros(3, T, V, requires_grad=True) + 0.0, "does not read the output"),
    ],
)
def test_models_that_are_refused(end: Callable[[Tensor], Any], why: str) -> None:
    module = Plain(end)
    with pytest.raises(BadInput, match=why):
        _installed(module)
    assert "forward" not in vars(module.head)


def test_heads_that_are_refused() -> None:
    module = Plain()
    module.head = _OwnHead(D, V)
    with pytest.raises(BadInput, match="head of class _OwnHead"):
        _installed(module)
    with pytest.raises(BadInput, match="no linear module"):
        _installed(nn.Sequential(nn.Embedding(V, D)))
    compiled = Plain()
    compiled.head.forward = torch.compile(compiled.head.forward, backend="eager")
    with pytest.raises(BadInput, match=r"torch\.compile"):
        _installed(compiled)


def test_a_loss_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.saver.head import cut_head

    right = cut_head.cut.cut_cross_entropy
    monkeypatch.setattr(cut_head.cut, "cut_cross_entropy", lambda *a, **k: right(*a, **k) * 1.001)
    with pytest.raises(BadInput, match="the loss by"):
        _installed(Plain())
    staged = Plain()
    _installed(staged, in_stages=True)
    with pytest.raises(BadInput, match="the loss by"):
        _loss(staged)


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"filter": 1.5}, "a probability"),
        ({"filter": 1e-6}, "gradients: backward"),
        ({"gradients": "both"}, "gradients"),
        ({"by": "liger"}, "a model on cpu"),
        ({"tiles": 3}, "tiles"),
    ],
)
def test_bad_settings(fields: Mapping[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        _installed(Plain(), {"cut_cross_entropy": dict(fields)})
