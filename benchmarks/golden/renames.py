"""Configuration keys and words that later commits rename.

The runs are written in the keys of the first commit. A commit that renames keys or words appends one `Renames` to
`RENAMES`; the tuple stays in the order of the commits. An example:

    Renames(
        marker="`plan.sharding`",
        names={
            "train": {"clip": "max_grad_norm"},
            "plan": {"states": "sharding", "share": "batch_fractions", "tree": "recursive_doubling"},
            "plan.states": {"whole": "none"},
            "plan.sync": {"every": "sync_every"},
            "plan.sync.zero_one": {"every": "local_step_clipper"},
        },
    )
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """The renames of one commit.

    marker: text in docs/reference/*.md that only trees from this commit on contain.
    names: dotted key before the commit -> {old name: new name}. A rename applies to keys and to text values at any
    depth below its dotted key; where several dotted keys match, the longest wins.
    """

    marker: str
    names: Mapping[str, Mapping[str, str]]

    def apply(self, values: Any, key: str = "") -> Any:
        """Rename the keys and words of `values`, which stand at the dotted `key`."""
        if isinstance(values, Mapping):
            return {self._rename(k, key): self.apply(v, f"{key}.{k}" if key else k) for k, v in values.items()}
        if isinstance(values, list):
            return [self.apply(value, key) for value in values]
        return self._rename(values, key) if isinstance(values, str) else values

    def _rename(self, name: str, key: str) -> str:
        while key:
            if (new := self.names.get(key, {}).get(name)) is not None:
                return new
            key = key.rpartition(".")[0]
        return name


_EXCHANGE = {
    "gather": "all_gather",
    "tree": "recursive_doubling",
    "warm_up": "warmup",
    "union_sum": "block_sparse",
    "identity": "float32",
    "between": "inter",
    "island": "intra",
    "inside": "intra_codec",
    "left": "p_exchange",
    "back": "return_codec",
    "block_numel": "block_size",
}
FIELD_WORDS = Renames(
    marker="`plan.sharding`",
    names={
        "train": {
            "clip": "max_grad_norm",
            "schedule": "lr_schedule",
            "objective": "loss",
            "sample": "sample_prompt",
            "sample_tokens": "sample_max_new_tokens",
        },
        "train.optimizer": {"freeze": "freeze_step", "largest": "max_coeff", "trust": "trust_coefficient"},
        "train.schedule": {"floor": "min_lr_factor"},
        "plan": {
            "share": "batch_fractions",
            "stages": "stage_ranks",
            "schedule": "pipeline_schedule",
            "boundary": "activation_compression",
            "states": "sharding",
            "residuals": "residuals_on_resume",
        },
        "plan.schedule": {"one_stage": "single_stage"},
        "plan.boundary": {"plain": "none", "coded": "codec", "top_k": "topk", **_EXCHANGE},
        "plan.exchange": _EXCHANGE,
        "plan.adapted_from": _EXCHANGE,
        "plan.states": {
            "whole": "none",
            "level": "shard_group",
            "weights": "weights_group",
            "states": "states_group",
            "island": "island",
        },
        "plan.states.sdp4bit": {"weights": "weights", "gradients_inside": "intra_gradients"},
        "plan.sync": {
            **{name: new for name, new in _EXCHANGE.items() if name not in ("between", "island")},
            "every": "sync_every",
            "delay": "sync_delay",
            "mix": "alpha",
            "carry": "keep_local_progress",
            "start": "warmup_steps",
            "steps": "local_steps",
            "second_moments": "average_second_moments_every",
            "outer": "outer_optimizer",
            "mu": "momentum",
            "each": "step_exchange",
            "full": "global_sync_every",
            "graph": "topology",
            "samples": "directions",
        },
        "plan.sync.zero_one": {
            "every": "local_step_clipper",
            "start": "var_freeze_step",
            "spaced": "var_update_scaler",
            "doubles": "local_step_scaler",
        },
    },
)
RENAMES: tuple[Renames, ...] = (FIELD_WORDS,)


def apply_all(renames: Iterable[Renames], values: Any) -> Any:
    """Apply the renames of several commits, one after the other."""
    for each in renames:
        values = each.apply(values)
    return values
