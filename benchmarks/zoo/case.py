"""A case: a tiny model of one type, its batches, and its loss. What is done with them is up to others.

`found(kind)` searches, once, for what runs; a case is plain values, so that any process makes the same model
(`module_of`) and the same batches (`batch_of(case.form, ...)`) from it.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.loss import IGNORE, Loss
from gossamer.model.forward_adapter import caller_of
from gossamer.model.source.factory import Factory
from gossamer.partition.model_provider import OriginSource
from zoo.inputs import Form, batch_of, forms
from zoo.kinds import class_of, config_class, model_class
from zoo.shrink import recipes

MOST_PARAMETERS = 130_000_000
MOST_TRIES = 400  # of shapes of inputs, per type


class Unbuilt(Exception):
    """No recipe gave a config whose model runs uncut."""


class Different(Exception):
    """The cut model does not do what the uncut one does."""


@dataclass(frozen=True)
class Case:
    kind: str
    recipe: str
    form: Form


def found(kind: str) -> Case:
    """The first recipe and form with which a model of this type runs, with padding and without."""
    said: list[str] = []
    for recipe, config in recipes(config_class(kind)):
        if isinstance(config, Exception):
            said.append(f"{recipe}: {short(config)}")
            continue
        try:
            module = _module(kind, config)
        except Exception as error:
            said.append(f"{recipe}: {short(error)}")
            continue
        for form in _forms(kind, module):
            try:
                with torch.no_grad():
                    for padded in (False, True):
                        loss_of(module, batch_of(form, seed=0, padded=padded))
                return Case(kind, recipe, form)
            except Exception as error:
                said.append(f"{recipe}: {short(error)} of {form.shape}")
    raise Unbuilt(" | ".join({line.partition(": ")[2]: line for line in reversed(said)}.values()))


def module_of(case: Case) -> nn.Module:
    """The same weights every time."""
    return _module(case.kind, _config(case.kind, case.recipe))


def source_of(case: Case) -> OriginSource:
    """Of the model, as a configuration with a factory gives it to every process of a run."""
    return OriginSource(Factory(f"{__name__}:made", {"kind": case.kind, "recipe": case.recipe}), seed=0)


def made(kind: str, recipe: str) -> nn.Module:
    """The factory."""
    module = _from(model_class(kind), copy.deepcopy(_config(kind, recipe))).float()
    module.register_forward_pre_hook(_draw_alike)
    return module


def _draw_alike(*_: Any) -> None:
    """What a forward draws from generators that are not torch's does not depend on what ran before."""
    random.seed(0)
    np.random.seed(0)


def _config(kind: str, recipe: str) -> Any:
    return next(config for name, config in recipes(config_class(kind)) if name == recipe)


@dataclass(frozen=True, slots=True)
class Own(Loss):
    """The model's own loss; else that of a language model where it gives logits for each label, else a mean square."""

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if getattr(output, "loss", None) is not None:
            return output.loss.mean()
        logits, labels = output.logits if hasattr(output, "logits") else output[0], batch["labels"]
        if logits.dim() == 3 and logits.shape[:2] == labels.shape:
            shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
            return F.cross_entropy(logits.float().flatten(0, -2), shifted.flatten())
        real = [x.float() for x in tree_leaves(logits) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.square().mean() for x in real]).sum()

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()


def loss_of(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Of the model as the package calls it."""
    return Own()(caller_of(module, batch)(module, batch), batch)


def short(error: BaseException, most: int = 160) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:most]}"


def _module(kind: str, config: Any) -> nn.Module:
    if class_of(kind) == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    made, config = model_class(kind), copy.deepcopy(config)
    with torch.device("meta"):
        size = sum(p.numel() for p in _from(made, copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise Unbuilt(f"{size} parameters")
    torch.manual_seed(0)
    return _from(made, config).train().float()


def _from(made: Any, config: Any) -> nn.Module:
    try:
        return made._from_config(config, attn_implementation="eager")
    except ValueError as error:
        if "eager" not in str(error) and "attention" not in str(error):
            raise
        return made._from_config(config)


def _forms(kind: str, module: Any) -> Iterator[Form]:
    parameters = inspect.signature(module.forward).parameters
    named = [module.main_input_name, "input_values", "input_features", "pixel_values", "input_ids"]
    main = next((n for n in named if n in parameters), module.main_input_name)
    if class_of(kind) in ("causal", "masked", "seq2seq"):
        main = "input_ids"
    for number, form in enumerate(forms(class_of(kind), module.config, main, parameters)):
        if number < MOST_TRIES:
            yield form
