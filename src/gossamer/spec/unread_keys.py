"""Configuration keys that nothing reads beside the other keys: each raises an error that names the conflicting one.

A key counts as written where its value is not the default: what `gossamer config show` prints is a configuration too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gossamer.spec.config import (
    AdversarialSection,
    DataSection,
    EarlyStopSection,
    PlanSection,
    RunConfig,
    TrainSection,
    VerifySection,
)
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told
from gossamer.spec.watched_keys import check_watched

_DATA, _PLAN, _TRAIN, _VERIFY = DataSection(), PlanSection(), TrainSection(), VerifySection()
_STOP, _ADVERSARIAL = EarlyStopSection(), AdversarialSection()


def in_stages(config: RunConfig) -> bool:
    """Return whether the configuration splits the model into pipeline stages."""
    return config.plan.stage_ranks != "auto" or config.plan.mesh.pipe not in (1, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A configuration key that must not be written (`is_written`) where nothing reads it (`is_read` is false)."""

    key: str
    is_written: Callable[[RunConfig], bool]
    is_read: Callable[[RunConfig], bool]
    wanted: str
    got: Callable[[RunConfig], str]
    do: str

    def told_of(self, config: RunConfig) -> BadInput | None:
        """Return the error where the key was written and nothing would read it; None otherwise."""
        if not self.is_written(config) or self.is_read(config):
            return None
        return bad_input(wanted=self.wanted, got=self.got(config), do=self.do, key=self.key)


_STAGES = "a model in 2 or more pipeline stages, without which this key has no effect"
_NO_STAGES = "plan.mesh.pipe 1"


def without_stages(key: str) -> BadInput:
    """Return the error about a key that concerns stage boundaries, for a model that is not split into stages."""
    do = f"set plan.mesh.pipe to the number of stages, or leave {key} out"
    return bad_input(wanted=_STAGES, got=_NO_STAGES, do=do, key=key)


_BESIDE_TEXT = (
    Unread(
        key="plan.cuts",
        is_written=lambda c: c.plan.cuts != _PLAN.cuts,
        is_read=in_stages,
        wanted=_STAGES,
        got=lambda c: _NO_STAGES,
        do="set plan.mesh.pipe to the number of stages, or leave plan.cuts out",
    ),
    Unread(
        key="plan.activation_compression",
        is_written=lambda c: c.plan.activation_compression != _PLAN.activation_compression,
        is_read=in_stages,
        wanted=_STAGES,
        got=lambda c: _NO_STAGES,
        do="set plan.mesh.pipe to the number of stages, or leave plan.activation_compression out",
    ),
    Unread(
        key="plan.adapt_every",
        is_written=lambda c: c.plan.adapt_every != _PLAN.adapt_every,
        is_read=lambda c: c.plan.adapt != "none",
        wanted="a policy in plan.adapt, without which plan.adapt_every has no effect",
        got=lambda c: "plan.adapt none",
        do="name one of `gossamer methods policy` as plan.adapt, or leave plan.adapt_every out",
    ),
    Unread(
        key="plan.adapt_window",
        is_written=lambda c: c.plan.adapt_window != _PLAN.adapt_window,
        is_read=lambda c: c.plan.adapt != "none",
        wanted="a policy in plan.adapt, without which plan.adapt_window has no effect",
        got=lambda c: "plan.adapt none",
        do="name one of `gossamer methods policy` as plan.adapt, or leave plan.adapt_window out",
    ),
    Unread(
        key="plan.lossy",
        is_written=lambda c: c.plan.lossy != _PLAN.lossy,
        is_read=lambda c: c.plan.exchange == "auto",
        wanted="plan.exchange auto, without which plan.lossy has no effect",
        got=lambda c: f"plan.exchange {told(c.plan.exchange)}",
        do="set plan.exchange to auto, or leave plan.lossy out: a named exchange is used even if it is lossy",
    ),
    Unread(
        key="train.verify.tolerance_factor",
        is_written=lambda c: c.train.verify.tolerance_factor != _VERIFY.tolerance_factor,
        is_read=lambda c: c.train.verify.every > 0,
        wanted="train.verify.every above 0, without which the tolerance has no effect",
        got=lambda c: "train.verify.every 0",
        do="set train.verify.every to a number of steps, or leave train.verify.tolerance_factor out",
    ),
    Unread(
        key="train.verify.on_failure",
        is_written=lambda c: c.train.verify.on_failure != _VERIFY.on_failure,
        is_read=lambda c: c.train.verify.every > 0,
        wanted="train.verify.every above 0, without which on_failure has no effect",
        got=lambda c: "train.verify.every 0",
        do="set train.verify.every to a number of steps, or leave train.verify.on_failure out",
    ),
    Unread(
        key="train.sample_max_new_tokens",
        is_written=lambda c: c.train.sample_max_new_tokens != _TRAIN.sample_max_new_tokens,
        is_read=lambda c: bool(c.train.sample_prompt),
        wanted="a prompt to continue, without which this key has no effect",
        got=lambda c: "no train.sample_prompt",
        do="set train.sample_prompt, or leave train.sample_max_new_tokens out",
    ),
    Unread(
        key="train.early_stop.min_delta",
        is_written=lambda c: c.train.early_stop.min_delta != _STOP.min_delta,
        is_read=lambda c: c.train.early_stop.patience > 0,
        wanted="train.early_stop.patience above 0, without which no run ends early",
        got=lambda c: "train.early_stop.patience 0",
        do="set train.early_stop.patience to a number of evaluations, or leave train.early_stop.min_delta out",
    ),
    Unread(
        key="train.early_stop.monitor",
        is_written=lambda c: c.train.early_stop.monitor != _STOP.monitor,
        is_read=lambda c: c.train.early_stop.patience > 0,
        wanted="train.early_stop.patience above 0, without which no run ends early",
        got=lambda c: "train.early_stop.patience 0",
        do="set train.early_stop.patience to a number of evaluations, or leave train.early_stop.monitor out",
    ),
    Unread(
        key="data.isolate",
        is_written=lambda c: c.data.isolate != _DATA.isolate,
        is_read=lambda c: c.data.pack,
        wanted="packed sequences, in which one document follows another",
        got=lambda c: "data.pack false",
        do="leave data.isolate out: without packing no sequence has more than one document",
    ),
)


def _without_text(name: str) -> Unread:
    """Return the rule about a key of text data, which a dataset made by data.factory does not read."""
    key = f"data.{name}"
    return Unread(
        key=key,
        is_written=lambda c: getattr(c.data, name) != getattr(_DATA, name),
        is_read=lambda c: c.data.factory is None,
        wanted=f"data from {key} or from data.factory",
        got=lambda c: f"data.factory {c.data.factory} too, which reads no {key}",
        do=f"leave one of the two out: arguments of the factory are in data.config, not in {key}",
    )


def _without_epsilon(name: str) -> Unread:
    """Return the rule about a setting of adversarial training where there is none."""
    key = f"train.adversarial.{name}"
    return Unread(
        key=key,
        is_written=lambda c: getattr(c.train.adversarial, name) != getattr(_ADVERSARIAL, name),
        is_read=lambda c: c.train.adversarial.epsilon > 0,
        wanted="train.adversarial.epsilon above 0, without which this key has no effect",
        got=lambda c: "train.adversarial.epsilon 0",
        do=f"set train.adversarial.epsilon, or leave {key} out",
    )


UNREAD: tuple[Unread, ...] = (
    *_BESIDE_TEXT,
    *map(_without_text, ("source", "tokenizer", "pack", "isolate", "validation", "cache")),
    *map(_without_epsilon, ("alpha", "direction", "delay", "ahead", "inputs")),
    Unread(
        key="data.config",
        is_written=lambda c: c.data.config != _DATA.config,
        is_read=lambda c: c.data.factory is not None,
        wanted="data.factory, whose arguments these are",
        got=lambda c: "no data.factory",
        do="set data.factory, or leave data.config out",
    ),
)


def unread(config: RunConfig) -> Iterator[BadInput]:
    """Yield an error for every key that was written and that nothing would read."""
    for one in UNREAD:
        if (error := one.told_of(config)) is not None:
            yield error


def check_given(config: RunConfig) -> None:
    """Raise BadInput for the first key that nothing would read, or that names a figure that no evaluation has.

    Needs no model, no plan and no torch.
    """
    for error in unread(config):
        raise error
    check_watched(config)
