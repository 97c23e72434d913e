"""Earlier names of configuration keys, methods and parameters, each with the present one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

KEYS: Final[Mapping[str, str]] = {
    "train.schedule": "train.lr_schedule",
    "train.objective": "train.loss",
    "train.clip": "train.max_grad_norm",
    "train.sample": "train.sample_prompt",
    "train.sample_tokens": "train.sample_max_new_tokens",
    "train.verify.margin": "train.verify.tolerance_factor",
    "machines.heartbeat_s": "machines.heartbeat_timeout_s",
    "plan.share": "plan.batch_fractions",
    "plan.stages": "plan.stage_ranks",
    "plan.microbatches": "train.accumulate",
    "plan.schedule": "plan.pipeline_schedule",
    "plan.boundary": "plan.activation_compression",
    "plan.states": "plan.sharding",
    "plan.residuals": "plan.residuals_on_resume",
}
PLAN_FIELDS: Final[Mapping[str, str]] = {
    "share": "batch_fractions",
    "stages": "stage_ranks",
    "schedule": "pipeline_schedule",
    "boundary": "activation_compression",
    "states": "sharding",
}
VALUES: Final[Mapping[str, Mapping[str, str]]] = {  # by key: values that are no methods
    "train.verify.on_failure": {"tell": "warn"},
    "plan.residuals_on_resume": {"merge": "redistribute", "drop": "reset"},
}
LEVELS: Final[Mapping[str, str]] = {"island": "intra", "between": "inter"}  # of lines of exchanges
ALL_LEVELS: Final[tuple[str, ...]] = ("all", *LEVELS, *LEVELS.values())  # by which a line is told from other lists
METHODS: Final[Mapping[str, str]] = {
    "gather": "all_gather",
    "tree": "recursive_doubling",
    "warm_up": "warmup",
    "union_sum": "block_sparse",
    "identity": "float32",
    "whole": "none",
    "plain": "none",
    "coded": "codec",
    "top_k": "topk",
    "one_stage": "single_stage",
}
_LOCAL_SGD = {
    "every": "sync_every",
    "start": "warmup_steps",
    "steps": "local_steps",
    "patience_s": "straggler_timeout_s",
}
_DILOCO = {
    **_LOCAL_SGD,
    "delay": "sync_delay",
    "mix": "alpha",
    "carry": "keep_local_progress",
    "second_moments": "average_second_moments_every",
    "outer": "outer_optimizer",
}
_CSER = {"every": "sync_every", "each": "step_exchange", "start": "warmup_steps"}
_BLOCK = {"block_numel": "block_size"}
_LAMB = {"largest": "max_coeff", "vectors": "adapt_1d"}
_SHARD_GROUP = {"level": "shard_group"}
_RETURN = {"back": "return_codec"}
_OVERLAP = {"overlap": "overlap_max_senders"}
_SDP4BIT = {"gradients_inside": "intra_gradients", "level": "shard_group"}
PARAMETERS: Final[Mapping[str, Mapping[str, str]]] = {  # by method, under its present name
    **dict.fromkeys(("diloco", "streaming_diloco", "dasgd", "dsm", "slowmo", "fedhyper"), _DILOCO),
    **dict.fromkeys(("local_sgd", "post_local_sgd", "qsparse_local_sgd"), _LOCAL_SGD),
    **dict.fromkeys(("cser", "cser_pl"), _CSER),
    **dict.fromkeys(("random_blocks", "block_sparse", "int4", "int8", "sign", "ternary"), _BLOCK),
    **dict.fromkeys(("lamb", "lans"), _LAMB),
    **dict.fromkeys(("zero1", "zero2"), _SHARD_GROUP),
    **dict.fromkeys(("sdp4bit", "zeropp"), _SDP4BIT),
    **dict.fromkeys(("two_shot", "qsgd", "codec"), _RETURN),
    **dict.fromkeys(("uneven_topk", "bcrs"), _OVERLAP),
    "co2": {"every": "sync_every", "start": "warmup_steps", "outer": "outer_optimizer"},
    "gossip": {"every": "sync_every", "full": "global_sync_every", "graph": "topology", "start": "warmup_steps"},
    "just_one_byte": {"samples": "directions"},
    "zero_one": {
        "every": "local_step_clipper",
        "start": "var_freeze_step",
        "spaced": "var_update_scaler",
        "doubles": "local_step_scaler",
    },
    "nesterov": {"mu": "momentum"},
    "stale_momentum": {"mu": "momentum"},
    "slow_momentum": {"beta": "momentum"},
    "sign_momentum": {"decay": "weight_decay"},
    "zero3": {"weights": "weights_group", "states": "states_group"},
    "hierarchical": {"between": "inter", "inside": "intra_codec"},
    "powersgd": {"left": "p_exchange"},
    "fp8": {"form": "format", **_BLOCK},
    "lars": {"trust": "trust_coefficient", "vectors": "adapt_1d"},
    "one_bit_adam": {"freeze": "freeze_step"},
    "one_bit_lamb": {
        **_LAMB,
        "freeze": "freeze_step",
        "average": "coeff_beta",
        "least": "factor_min",
        "most": "factor_max",
        "change": "factor_threshold",
    },
    "cosine": {"floor": "min_lr_factor"},
    "warmup_stable_decay": {"floor": "min_lr_factor", "shape": "decay_type"},
}


def key_now(key: str) -> str:
    """Return the present name of a key that has another one by now, else ""."""
    return KEYS.get(key, "")


def method_now(name: str, known: Collection[str]) -> str:
    """Return the present name of a method, among `known`, that has another one by now, else ""."""
    return now if (now := METHODS.get(name, "")) in known else ""


def parameter_now(method: str, name: str) -> str:
    """Return the present name of a method's parameter that has another one by now, else ""."""
    return PARAMETERS.get(method, {}).get(name, "")
