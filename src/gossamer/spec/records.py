"""The lines of a run's records.jsonl: the single source of truth that displays, reports and trackers read.

Every line is one JSON object with `kind`, `time_s` (seconds since the epoch) and the fields of its class.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The base class of all lines of records.jsonl."""

    kind: ClassVar[str] = "record"
    time_s: float = field(default_factory=time.time)

    def line(self) -> str:
        """Return the record as one line of JSON, without the line end."""
        return json.dumps({"kind": self.kind, **asdict(self)}, separators=(",", ":"), allow_nan=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Record):
    """The start of a process group on the run; one per start or resume."""

    kind: ClassVar[str] = "start"
    ranks: int
    step: int  # steps already committed
    steps: int  # steps wanted
    model: str
    parameters: int
    trained: int = 0  # of the parameters, those that are not frozen; 0: not said
    data: str
    tokens_per_step: int
    flop_per_token: float
    peak_flop_per_s: float  # measured matmul rate of all ranks together; 0: not measured
    exchange: str
    precision: str = ""  # of forward and backward
    limit_s: float = 0.0  # `train.seconds`, after which the run ends; 0: none
    hosts: tuple[int, ...] = ()  # of each rank, its host, counted from 0; empty: not said
    loss_unit: str = ""  # "nats/token"; "nats/pair" of preferences; "": not known, as with a loss of the model's own
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)  # of the rank that writes: host, system, processor, cores
    data_fingerprint: str = ""  # equal for equal training data; "": not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """A step that was committed, or rejected (then no parameter changed).

    In local-update training it is a step of rank 0's replica group, and so are its loss, weight and gradient norm;
    `Islands` holds those of the others. Steps that only other groups make have no line: the next line includes their
    samples, tokens and time.
    """

    kind: ClassVar[str] = "step"
    step: int
    committed: bool
    loss: float  # mean over valid labels, nats
    weight: float  # valid labels of the step over all ranks that made it together
    tokens: int
    samples: tuple[int, int]  # global sample indices [from, to): the ledger
    lr: float
    grad_norm: float
    step_s: float
    compute_s: float
    exposed_s: float  # exposed communication: waited for means, and for the ranks to agree on the step
    wire_bytes: dict[str, int]  # bytes this rank sent, by link
    peak_bytes: int  # largest resident memory of this rank so far
    data_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Length(Record):
    """A new number of steps for the training loop: `train.seconds` allows another one, or the run ends early."""

    kind: ClassVar[str] = "length"
    step: int  # after which the number was found
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands(Record):
    """The status of the replica groups (local-update training) since the last such line; indexed by island."""

    kind: ClassVar[str] = "islands"
    step: int  # the last one included
    losses: tuple[float, ...]  # means over valid labels, nats; nan where there were none
    weights: tuple[float, ...]  # valid labels
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Record):
    """The loss on the sequences of one validation set after a step; the sets follow in their order."""

    kind: ClassVar[str] = "evaluation"
    step: int
    loss: float
    bits_per_byte: float | None
    sequences: int
    seconds: float
    name: str = "validation"  # of the set in data.validation; this one for a fraction
    metrics: dict[str, float] = field(default_factory=dict)  # of train.metrics, by the name of the function


@dataclass(frozen=True, slots=True, kw_only=True)
class Best(Record):
    """The best value so far of the figure that `train.keep_best` names; the checkpoint of the step is kept."""

    kind: ClassVar[str] = "best"
    step: int
    name: str  # of the validation set
    figure: str  # "loss", or a metric of train.metrics
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Record):
    """A checkpoint that was committed, or failed to be (`error` says why; the run goes on)."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    bytes: int
    copy_s: float
    write_s: float
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Record):
    """The text that the model generated from the prompt after a step."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Record):
    """A step that other ranks recomputed before it took effect.

    `distance` is the largest difference between two ranks' losses or gradient projections of the same samples, relative
    to their norm; `named` are the ranks that were outvoted.
    """

    kind: ClassVar[str] = "verification"
    step: int
    distance: float
    tolerance: float
    named: tuple[int, ...]
    seconds: float = 0.0  # by which the step took longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(Record):
    """The comparison of the layout's gradients with those of one process, before the first step.

    `message` is the result in words.
    """

    kind: ClassVar[str] = "proof"
    outcome: str  # "equal" | "kept": equal, as an earlier start of the run has found | "not proved" | "failed"
    message: str
    losses: tuple[float, float] = (0.0, 0.0)  # of the layout, and of one process; nats
    tensors: int = 0  # trained parameters
    proved: int = 0  # parameters whose gradients are equal
    idle: tuple[str, ...] = ()  # had no gradient in any of the micro-batches: nothing is known of them
    within: float = 0.0  # the largest distance of a gradient, as a part of its size; in float32
    within_coarse: float = 0.0  # in the precision of the run, where that is another
    microbatches: int = 0  # that the complete model computed in one process
    builds: int = 0  # of the complete model
    alone_s: float = 0.0  # of one process: two builds, and these micro-batches
    divided_s: float = 0.0  # of the layout: one build, and its part of them
    seconds: float = 0.0

    @property
    def is_proved(self) -> bool:
        return self.outcome in ("equal", "kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Record):
    """A log message for the reader of the run: a rejected step, a fallback, a slow rank."""

    kind: ClassVar[str] = "event"
    level: str  # "info" | "warning" | "error"
    message: str
    step: int = -1
    rank: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Record):
    """The end of a run, with the outcome of its training loop: done, interrupted or failed."""

    kind: ClassVar[str] = "end"
    step: int
    outcome: str  # "done" | "interrupted" | "failed"
    message: str = ""
    seconds: float = 0.0
    reason: str = ""  # of a run that is done before its last step: "early_stop" | "callback"


_ALL: tuple[type[Record], ...] = (
    Start,
    Step,
    Length,
    Islands,
    Evaluation,
    Best,
    Saved,
    Sample,
    Verification,
    Proof,
    Event,
    End,
)
KINDS: dict[str, type[Record]] = {c.kind: c for c in _ALL}
_FIELDS = {c: frozenset(f.name for f in fields(c)) for c in _ALL}  # once: a run has 100,000 lines


def read_record(line: str) -> Record | None:
    """Parse one line; None for a line cut short by a crash, of a kind this version does not know, or with a value of
    another type than its field: one damaged record must not stop the view of a run, or of all runs.
    """
    try:
        data: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    data = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    cls = KINDS.get(str(data.pop("kind", "")))
    if cls is None:
        return None
    known = _FIELDS[cls]
    try:
        record = cls(**{k: v for k, v in data.items() if k in known})
    except TypeError:
        return None
    for name, types, inner in _CHECKS[cls]:
        value = getattr(record, name)
        if not isinstance(value, types):
            return None
        if inner and value and not all(isinstance(one, inner) for one in _inside(value)):
            return None
    return record


def _checks(cls: type[Record]) -> tuple[tuple[str, tuple[type, ...], tuple[type, ...]], ...]:
    """Return name, types, and types of what is inside (of a tuple or a dictionary; empty: anything) of every field."""
    hints = get_type_hints(cls)
    return tuple((one.name, _types(hints[one.name]), _inner_types(hints[one.name])) for one in fields(cls))


def _types(hint: Any) -> tuple[type, ...]:
    """Return the types that a value of this type hint may have in JSON."""
    if isinstance(hint, UnionType):
        return tuple(one for part in get_args(hint) for one in _types(part))
    if hint in (float, int):  # JSON has numbers alone
        return (float, int)
    if hint is Any:
        return (object,)
    found = get_origin(hint) or hint
    return (found,) if isinstance(found, type) else (object,)


def _inner_types(hint: Any) -> tuple[type, ...]:
    parts = [part for part in get_args(hint) if part is not Ellipsis]
    if get_origin(hint) is dict:
        return _types(parts[1])
    if get_origin(hint) is tuple:
        return tuple(one for part in parts for one in _types(part))
    return ()


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


_CHECKS = {c: _checks(c) for c in _ALL}
