"""The fixed list of training runs, in the configuration keys of the first commit.

Each run states the sections in which it differs from `BASE`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
BASE: Sections = {
    "model": {"hf": "llama", "config": MODEL},
    "data": {"source": "text:corpus/*.txt", "tokenizer": "byte", "sequence": 32, "validation": 0.3, "cache": "cache"},
    "train": {
        "steps": 4,
        "batch": 8,
        "optimizer": {"adamw": {"lr": 2e-3}},
        "schedule": "constant",
        "seed": 0,
        "evaluate_every": 2,
        "evaluate_sequences": 8,
        "checkpoint_every": 2,
    },
    "machines": {"processes": 2, "threads": 1},
    "run": {"directory": "runs", "name": "golden", "display": "quiet"},
}
FILES, WORDS_PER_FILE = 6, 600
WORDS = ("stone", "river", "lamp", "seven", "green", "under", "walks", "slowly", "because", "light", "house", "paper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run: a configuration, and what a later resume changes in it.

    changes: sections that override those of `BASE`.
    resume: overrides of a resume after the last step; empty for no resume.
    resumes_before: both commits resume a run that the first commit trained.
    is_wrapped: the run is a user's own loop; its sections hold the arguments of `gossamer.wrap`.
    is_async: messages overlap several steps, and the clock decides in which step each is metered.
    """

    name: str
    changes: Sections = field(default_factory=dict)
    resume: Sections = field(default_factory=dict)
    resumes_before: bool = False
    is_wrapped: bool = False
    is_async: bool = False

    def config(self) -> dict[str, dict[str, Any]]:
        """Merge the changes into `BASE`, section by section."""
        base: Sections = {} if self.is_wrapped else BASE
        return {name: {**base.get(name, {}), **self.changes.get(name, {})} for name in {**base, **self.changes}}


def write_corpus(folder: Path) -> None:
    """Write a corpus of random words that depends on no file of either commit."""
    folder.mkdir()
    for index in range(FILES):
        words = random.Random(index).choices(WORDS, k=WORDS_PER_FILE)
        (folder / f"{index}.txt").write_text(" ".join(words))


def with_ranks(ranks: int, **sections: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Run the sections on `ranks` local processes."""
    return {**sections, "machines": {"processes": ranks, **sections.get("machines", {})}}


def with_exchange(exchange: Any, ranks: int = 2, **train: Any) -> Sections:
    """Average the gradients of `ranks` replicas by one exchange."""
    return with_ranks(ranks, plan={"exchange": exchange}, train=train)


def with_stages(stages: int, replicas: int = 1, **plan: Any) -> Sections:
    """Split each replica into pipeline stages; a step has four micro-batches in all."""
    mesh = {"pipe": stages, "replica": replicas}
    return with_ranks(stages * replicas, plan={"mesh": mesh, **plan}, train={"accumulate": 4 // replicas})


def with_sharding(states: Any, ranks: int = 2, **plan: Any) -> Sections:
    """Shard model states over `ranks` replicas."""
    return with_ranks(ranks, plan={"states": states, **plan})


def with_two_islands(plan: Mapping[str, Any]) -> Sections:
    """Group four ranks into two islands."""
    return with_ranks(4, plan=plan, machines={"islands": [[0, 1], [2, 3]]})


def with_sync(sync: Any, ranks: int = 2, **train: Any) -> Sections:
    """Train six steps on islands of one rank each, synchronized by one sync method."""
    islands = [[rank] for rank in range(ranks)]
    return with_ranks(ranks, plan={"sync": sync}, train={"steps": 6, **train}, machines={"islands": islands})


def with_feedback(exchange: Any) -> dict[str, Any]:
    """Wrap an exchange in error feedback."""
    return {"error_feedback": {"inner": exchange}}


INT8 = {"two_shot": {"codec": "int8"}}
TOPK = with_feedback({"topk": {"fraction": 0.05}})
POWERSGD = with_feedback({"powersgd": {"rank": 2}})
SIGNS = {"warm_up": {"steps": 2, "inner": with_feedback({"two_shot": {"codec": "sign"}})}}
DILOCO = {"every": 2, "outer": {"nesterov": {"lr": 0.7, "mu": 0.9}}}
HIERARCHICAL = {"hierarchical": {"between": with_feedback(INT8), "inside": "bfloat16"}}
TIED = {"hf": "llama", "config": {**MODEL, "tie_word_embeddings": True}}

ONE_PROCESS_AND_REPLICAS: dict[str, Sections] = {
    "one_process": with_ranks(1, train={"schedule": {"cosine": {"warmup": 0.5}}, "sample": "river "}),
    "replicas": with_ranks(2, plan={"lossy": True}),
    "unequal_shares": with_ranks(2, plan={"share": [0.75, 0.25]}),
    "accumulate_clip": with_ranks(2, train={"accumulate": 2, "clip": 0.5}),
    "bf16": with_ranks(2, train={"precision": "bf16"}),
    "bf16_parameters": with_ranks(2, model={"dtype": "bfloat16"}),
    "fp16": with_ranks(2, train={"precision": "fp16"}),
    "lamb": with_ranks(2, train={"optimizer": {"lamb": {"lr": 2e-3}}}),
    "lars": with_ranks(2, train={"optimizer": {"lars": {"lr": 0.1}}}),
    "verify": with_ranks(3, train={"verify": {"every": 1}}),
}
EXCHANGES: dict[str, Sections] = {
    "int8": with_exchange(INT8, 3),
    "powersgd": with_exchange(POWERSGD),
    "acp_sgd": with_exchange(with_feedback({"acp_sgd": {"rank": 2}})),
    "topk": with_exchange(TOPK, 3),
    "ef21": with_exchange({"ef21": {"inner": {"topk": {"fraction": 0.05}}}}),
    "momentum": with_exchange({"momentum": {"inner": INT8}}, clip=0),
    "one_bit_adam": with_exchange(
        {"momentum": {"inner": SIGNS}}, optimizer={"one_bit_adam": {"lr": 2e-3, "freeze": 2}}, clip=0
    ),
    "one_bit_lamb": with_exchange(
        {"momentum": {"inner": SIGNS}}, optimizer={"one_bit_lamb": {"lr": 2e-3, "freeze": 2}}, clip=0
    ),
    "tree": with_exchange("tree", 3),
    "star": with_exchange("star", 3),
    "by_parameter": with_exchange([["embed", "all", TOPK], [".", "all", "dense"]]),
    "hierarchical": with_two_islands({"exchange": HIERARCHICAL}),
}
STAGES: dict[str, Sections] = {
    "stages": with_stages(2),
    "stages_gpipe": with_stages(3, schedule="gpipe"),
    "stages_split": with_stages(2, schedule={"split_backward": {"inner": "one_f_one_b"}}, cuts=[0, 1]),
    "stages_recompute": with_stages(2, schedule="recompute"),
    "stages_int8": with_stages(2, boundary={"coded": {"codec": "int8"}}),
    "stages_tied": {**with_stages(2), "model": TIED},
    "stages_replicas": with_stages(2, 2),
    "stages_replicas_powersgd": with_stages(2, 2, exchange=POWERSGD),
}
SHARDING: dict[str, Sections] = {
    "zero1": with_sharding("zero1", 3),
    "zero1_int8": with_sharding("zero1", exchange=with_feedback(INT8)),
    "zero2": with_sharding("zero2"),
    "zero3": with_sharding("zero3"),
    "zero3_islands": with_two_islands({"states": {"zero3": {"weights": "island"}}}),
    "sdp4bit": with_sharding("sdp4bit"),
}
SYNC: dict[str, Sections] = {
    "local_sgd": with_sync({"local_sgd": {"every": 2}}),
    "diloco": with_sync({"diloco": {**DILOCO, "every": 4, "fragments": 4}}),
    "diloco_zero1": with_two_islands({"states": {"zero1": {"level": "island"}}, "sync": {"diloco": DILOCO}}),
    "diloco_second_moments": with_sync({"diloco": {"every": 2, "outer": "average", "second_moments": 1}}),
    "streaming_diloco": with_sync({"streaming_diloco": {"every": 4, "fragments": 2, "delay": 1}}, 3),
    "co2": with_sync({"co2": {"every": 2}}),
    "cser": with_sync({"cser": {"every": 2}}),
    "zero_one": with_sync(
        {"zero_one": {"every": 2, "start": 2, "spaced": 1, "doubles": 1}},
        optimizer={"zero_one_adam": {"lr": 2e-3}},
        clip=0,
    ),
    "gossip_pairs": with_sync({"gossip": {"full": 4, "graph": "pairs"}}, 4),
    "gossip_ring": with_sync({"gossip": {"full": 4, "graph": "ring", "codec": "int4", "gamma": 0.8}}, 3),
    "just_one_byte": with_sync({"just_one_byte": {"samples": 2}}, optimizer={"sgd": {"lr": 1e-4}}),
}
RESUMED: dict[str, tuple[Sections, Sections]] = {
    "resume_topk": (with_exchange(TOPK, 4), with_ranks(2, train={"steps": 6})),
    "resume_zero1": (with_sharding("zero1", 4), with_ranks(2, train={"steps": 6})),
    "resume_stages": (with_stages(2), with_ranks(1, train={"steps": 6}, plan={"mesh": {"pipe": 1}})),
    "resume_diloco": (with_sync({"diloco": DILOCO}), with_ranks(2, train={"steps": 8})),
}
WRAPPED: dict[str, Sections] = {
    "wrap": {},
    "wrap_accumulate_clip": {"train": {"accumulate": 2, "clip": 0.5}},
    "wrap_topk": {"plan": {"exchange": TOPK}},
    "wrap_powersgd": {"plan": {"exchange": POWERSGD}, "train": {"clip": 1.0}},
    "wrap_unequal_shares": {"plan": {"share": [0.75, 0.25]}},
}
ASYNC = ("diloco_second_moments", "streaming_diloco", "co2")
TRAINED = {**ONE_PROCESS_AND_REPLICAS, **EXCHANGES, **STAGES, **SHARDING, **SYNC}

RUNS: dict[str, Run] = {
    run.name: run
    for run in (
        *(Run(name=name, changes=changes, is_async=name in ASYNC) for name, changes in TRAINED.items()),
        *(Run(name=name, changes=changes, resume=then) for name, (changes, then) in RESUMED.items()),
        *(
            Run(name=f"{name}_of_before", changes=changes, resume=then, resumes_before=True)
            for name, (changes, then) in RESUMED.items()
        ),
        *(Run(name=name, changes=changes, is_wrapped=True) for name, changes in WRAPPED.items()),
    )
}
