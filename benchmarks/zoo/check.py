"""One model type: a small config of it, cut, and compared with one process, gradient by gradient."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.model.cut.cuts import even_cuts
from gossamer.model.cut.lockstep import run_lockstep, stages_of
from gossamer.model.cut.trace import trace
from gossamer.model.randomness import UnitSeeds, unit_seeds
from gossamer.model.units import unit_names
from zoo.shrink import recipes

ROWS, SEQUENCE = 2, 16
TOLERANCE = 1e-5  # of the largest entry of a gradient
NOISE = 1e-4  # a gradient below this part of the largest of all (the bias of attention's keys) is rounding alone
Batch = Mapping[str, Any]


class Unbuilt(Exception):
    """No recipe gave a config whose model runs uncut."""


class Different(Exception):
    """The cut model does not do what the uncut one does."""


def check(kind: str, stages: Sequence[int]) -> dict[str, Any]:
    """What was compared; raises what went wrong."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    recipe, module = built(kind)
    exact = True
    for padded in (False, True):
        given = [batch(module, seed, padded) for seed in range(2)]
        expected = uncut(module, given)
        flow = trace(module, lambda b=given[0]: loss_of({}, module, b), units=unit_names(module))  # type: ignore[misc]
        for count in stages:
            exact &= same(expected, cut(module, flow, count, given), f"{count} stages{', padded' if padded else ''}")
    return {"recipe": recipe, "exact": exact, "calls": len(flow.calls)}


def built(kind: str) -> tuple[str, nn.Module]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    said = []
    for name, config in recipes(model_class.config_class or transformers.CONFIG_MAPPING[kind]):
        if isinstance(config, Exception):
            said.append(f"{name}: {short(config)}")
            continue
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        try:
            module = model_class._from_config(config, attn_implementation="eager").train().float()
            with torch.no_grad():
                for padded in (False, True):
                    loss_of({}, module, batch(module, 0, padded))
            return name, module
        except Exception as error:
            said.append(f"{name}: {short(error)}")
    raise Unbuilt(" | ".join({line.partition(": ")[2]: line for line in reversed(said)}.values()))


def batch(module: Any, seed: int, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = getattr(module.config.get_text_config(), "vocab_size", None) or module.config.vocab_size
    ids = torch.randint(5, vocabulary, (ROWS, SEQUENCE), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, SEQUENCE - 5 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(seeds: Mapping[int, UnitSeeds], module: Any, given: Batch) -> Tensor:
    known = inspect.signature(module.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    named = {k: v for k, v in given.items() if k in known or (takes_all and k == "attention_mask")}
    if hasattr(module.config, "use_cache") and ("use_cache" in known or takes_all):
        named["use_cache"] = False
    if id(module) not in seeds:
        return _loss(module(**named), given)
    with seeds[id(module)].at(0, int(given["input_ids"].sum())):
        return _loss(module(**named), given)


def _loss(output: Any, given: Batch) -> Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    logits = output.logits if hasattr(output, "logits") else output[0]
    labels = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def uncut(module: nn.Module, given: Sequence[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = copy.deepcopy(module)
    seeds = {id(module): unit_seeds(module, seed=1)}
    losses = []
    for rows in given:
        loss = loss_of(seeds, module, rows)
        with seeds[id(module)].at(0, 0):
            loss.backward()
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def cut(module: nn.Module, flow: Any, stages: int, given: Sequence[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    parts = stages_of(module, flow, even_cuts(flow, stages))
    seeds = {id(part.module): unit_seeds(part.module, seed=1) for part in parts}
    outcome = run_lockstep(parts, partial(loss_of, seeds), given)
    return outcome.losses, outcome.gradients


def same(expected: Any, ours: Any, where: str) -> bool:
    """Whether bit for bit; raises where not even close."""
    for theirs, mine in zip(expected[0], ours[0], strict=True):
        if not torch.isfinite(theirs):
            raise Different(f"{where}: the uncut loss is {float(theirs)}")
        if not torch.equal(theirs, mine):
            raise Different(f"{where}: loss {float(mine)} instead of {float(theirs)}")
    exact, noise = True, NOISE * float(max(g.abs().max() for g in expected[1].values()))
    for name in expected[1].keys() | ours[1].keys():
        theirs, mine = expected[1].get(name), ours[1].get(name)
        if theirs is None or mine is None:
            known = theirs if theirs is not None else mine
            if known is not None and known.abs().max() > 0:
                raise Different(f"{where}: {name} has {'no' if mine is None else 'a'} gradient")
            continue
        exact &= torch.equal(theirs, mine)
        error = float((theirs - mine).abs().max() / theirs.abs().max().clamp(min=noise))
        if not error <= TOLERANCE:
            raise Different(f"{where}: the gradient of {name} is off by {error:.1e} of its largest entry")
    return exact


def short(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:160]}"
