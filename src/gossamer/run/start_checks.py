"""The checks of a rank's inputs before a run: by itself, and against the inputs of the other ranks."""

from __future__ import annotations

import hashlib

from torch import nn

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.model.precision import precision_of
from gossamer.optimizer.master import HALF
from gossamer.run.checkpoint import trainable
from gossamer.run.metrics import load_metrics
from gossamer.run.parts import Parts
from gossamer.run.watch import Watch
from gossamer.sharding import shapes_of
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told
from gossamer.spec.odd_one_out import outvoted, parted


def check_before_start(parts: Parts) -> None:
    """Check the data, the model and the configuration before any process group exists.

    Raises BadInput, e.g. for too little training data, nothing trainable, a warm-up longer than the run, an unsuitable
    precision, or a parameter on the meta device.
    """
    plan, config = parts.plan, parts.config
    if len(parts.train) == 0:
        raise BadInput("the training data holds no sequence: give more text or a shorter data.sequence", key="data")
    if plan.batch > len(parts.train):
        raise bad_input(
            wanted=f"at least {plan.batch} training sequences (one step's batch)",
            got=f"{len(parts.train)} of {config.data.sequence} tokens",
            do="lower train.batch or data.sequence, or give more text",
            key="train.batch",
        )
    if config.train.sample_prompt and parts.words is None:
        raise bad_input(
            wanted="data that is text",
            got="sequences without a tokenizer",
            do="leave train.sample_prompt out",
            key="train.sample_prompt",
        )
    Watch.of(parts)
    _check_validation(parts)
    parts.recipe.lr_schedule.factor(0, config.train.steps)  # a warm-up that fits
    if not trainable(parts.outline):
        raise BadInput("no parameter of the model requires a gradient: nothing would be trained", key="model")
    parts.recipe.optimizer.check(trainable(parts.outline).keys())
    _check_guesses(parts)
    _check_statistics(parts)
    _check_hooks(parts)
    precision = precision_of(config.train.precision)
    for name, param in parts.outline.named_parameters():
        if param.is_floating_point():
            precision.check(param.dtype)
        if param.device.type == "meta":
            raise BadInput(f"parameter {name} is on the meta device: materialize the model first", key="model")
    _check_copies(parts)


def _check_guesses(parts: Parts) -> None:
    """Raise BadInput where the optimizer takes an embedding or the head for a linear layer, by the parameter's name."""
    declared = getattr(parts.outline, "get_output_embeddings", None)
    head = declared() if callable(declared) else None
    kinds = {id(one.weight): "an embedding" for one in parts.outline.modules() if isinstance(one, nn.Embedding)}
    if isinstance(weight := getattr(head, "weight", None), nn.Parameter):
        kinds.setdefault(id(weight), "the head")
    trained = trainable(parts.outline)
    for name, key in parts.recipe.optimizer.guessed(shapes_of(trained)).items():
        if (kind := kinds.get(id(trained[name]))) is not None:
            raise bad_input(
                wanted="weights of linear layers, which are told by their names where the setting is left out",
                got=f"{name}, which is {kind}",
                do="write regular expressions that are found in the names of weights of linear layers only",
                key=key,
            )


def _check_validation(parts: Parts) -> None:
    """Raise BadInput for metrics without validation data, and for a validation set that is looked at and is empty."""
    if load_metrics(parts.config.train.metrics) and not parts.validation:
        raise bad_input(
            wanted="validation data, on which metrics are computed",
            got="none",
            do="give text with data.validation, or leave train.metrics out",
            key="train.metrics",
        )
    empty = [name for name, one in parts.validation.items() if not len(one.batches)]
    if empty and (parts.config.train.keep_best is not False or parts.config.train.early_stop.patience):
        raise bad_input(
            wanted="validation sets with a sequence each, of which the best evaluation is looked for",
            got=f"none in {', '.join(empty)}",
            do="lower data.sequence, give more text, or leave train.keep_best and train.early_stop out",
            key="data.validation",
        )


def _check_statistics(parts: Parts) -> None:
    """Raise BadInput for running statistics (batch norm) with an optimizer that is evaluated at another point."""
    if not parts.recipe.optimizer.has_average:
        return
    found = [path for path, inner in parts.outline.named_modules() if _running_statistics(inner)]
    if found:
        raise bad_input(
            wanted=f"a model without running statistics with {told(parts.config.train.optimizer)}, which evaluates an "
            "averaged point and collects statistics at the trained one",
            got=f"{len(found)} modules that keep them, such as {found[0] or 'the model'}",
            do="use layer or group norm, or track_running_stats=False, or choose another optimizer such as adamw",
            key="train.optimizer",
        )


def _check_hooks(parts: Parts) -> None:
    """Raise BadInput for compiled units with an optimizer whose hooks on layers they would not call."""
    wanted = parts.recipe.optimizer.wants_vectors(trainable(parts.outline))
    if wanted and parts.config.model.compile:
        raise bad_input(
            wanted=f"a model that is not compiled with {told(parts.config.train.optimizer)}, which hooks its layers",
            got="model.compile: true",
            do="set model.compile to false, or choose eva_s, which needs no hooks",
            key="model.compile",
        )


def _running_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def _check_copies(parts: Parts) -> None:
    """Raise BadInput for local-update training of half-precision parameters with sharded optimizer states."""
    methods = parts.recipe.methods
    if methods.sync.loop is None:
        return
    halves = [name for name, param in trainable(parts.outline).items() if param.dtype in HALF]
    if halves and methods.sharding.is_sharded:
        raise bad_input(
            wanted="float32 parameters, to shard optimizer states with local updates",
            got=f"{len(halves)} parameters in half precision, such as {halves[0]}",
            do="set model.dtype to float32 (train.precision: bf16 still computes in bf16), or plan.sharding to none",
            key="plan.sharding",
        )


def check_agreement(pump: CommThread, facts: dict[str, str], *, level: str = "") -> None:
    """Check that all ranks hold the same `facts`, such as configuration, plan, data and model, by name.

    `level`: each group of this level by itself, as the ranks of one stage. All ranks call it. Raises BadInput that
    names the ranks which differ.
    """
    digests = [int.from_bytes(hashlib.sha256(v.encode()).digest()[:6], "big") for v in facts.values()]
    rows = gathered(pump.channel, digests)  # 48 bits are exact in float64
    groups = pump.channel.levels.groups[level] if level else (range(len(rows)),)
    for column, name in enumerate(facts):
        for group in groups:
            values = rows[list(group), column].tolist()
            if outvoted(values) != []:
                raise BadInput(
                    f"the ranks do not agree about the {name}: {parted(values, group)}. Give every host the same {name}"
                )


def fingerprint(module: nn.Module) -> str:
    """Return names, shapes and dtypes of all parameters, equal on all ranks (for values see `initial_values.py`)."""
    return "|".join(f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in module.named_parameters())
