"""The rows of the table by name: ours are exchanges, peers are other people's programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Method:
    """`plan` is the plan section of ours; `venv` the environment of a peer ("": this one's)."""

    name: str
    peer: bool
    plan: Any = None
    venv: str = ""
    like: str = ""  # a peer whose mathematics is that of one of our exchanges has that one's loss
    period: int = 1  # steps after which what is exchanged repeats itself: a round lasts whole ones, and its mean counts

    def exchange(self) -> Any:
        """The exchange as written, for what has one before a plan is made."""
        return None if self.peer else self.plan["exchange"]


def _ours(name: str, exchange: Any, **plan: Any) -> Method:
    return Method(name, False, {"exchange": exchange, **plan})


def _apart(name: str, period: int, sync: Any) -> Method:
    return Method(name, False, {"exchange": "dense", "sync": sync}, period=period)


def _two_shot(codec: str) -> Any:
    return {"error_feedback": {"inner": {"two_shot": {"codec": codec}}}}


OURS = [
    _ours("auto", "auto", lossy=True),
    _ours("auto_exact", "auto"),
    _ours("dense", "dense"),
    _ours("two_shot_bf16", {"two_shot": {"codec": "bfloat16"}}),
    _ours("ef_int8", _two_shot("int8")),
    _ours("ef_int4", _two_shot("int4")),
    _ours("ef_sign", _two_shot("sign")),
    _ours("ef_topk", {"error_feedback": {"topk": {"fraction": 0.01}}}),
    _ours("ef_powersgd", {"error_feedback": {"powersgd": {"rank": 4}}}),
    Method("sync_auto", False, {"exchange": "auto", "lossy": True, "sync": "auto"}, period=64),
    _ours("states_zero1", "dense", sharding="zero1"),
    _apart("local_sgd", 8, {"local_sgd": {"sync_every": 8}}),
    _apart("diloco", 48, {"diloco": {"sync_every": 48}}),
    _apart("diloco_int4", 48, {"diloco": {"sync_every": 48, "exchange": {"two_shot": {"codec": "int4"}}}}),
    _apart("streaming_diloco", 48, {"streaming_diloco": {"sync_every": 48}}),
    _apart("co2_int4", 24, {"co2": {"sync_every": 24, "exchange": {"two_shot": {"codec": "int4"}}}}),
]
PEERS = [
    Method("ddp", True, like="dense"),
    Method("ddp_fp16", True, like="fp16_hook"),
    Method("ddp_powersgd", True),
    Method("ddp_powersgd_one_bucket", True),
    *(Method(f"zero{stage}", True, venv="deepspeed", like="dense") for stage in range(4)),
    Method("torchft", True, venv="torchft", like="dense"),
    Method("torchft_local_sgd", True, venv="torchft", period=8),
    Method("torchft_diloco", True, venv="torchft", period=48),
]
KNOWN = {m.name: m for m in [*OURS, *PEERS]}
ALONE = Method("no_exchange", True)  # what a host computes when it exchanges nothing
UNTHROTTLED = "dense"  # of ours, on links that are not shaped: the denominator


def chosen(names: str, extra: list[str]) -> list[Method]:
    """Methods by their names ("all": all), and `extra` ones written NAME=EXCHANGE in YAML."""
    import yaml

    known = dict(KNOWN)
    for written in extra:
        name, _, exchange = written.partition("=")
        known[name] = _ours(name, yaml.safe_load(exchange))
    wanted = list(known) if names == "all" else [*names.split(","), *(w.partition("=")[0] for w in extra)]
    wrong = [name for name in wanted if name not in known]
    if wrong:
        raise SystemExit(f"no method is called {', '.join(wrong)}; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]
