"""A run as one who looks on reads it: the records that were appended, the plan, the configuration, the logs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.records import Evaluation, Event, Islands, Record, Step, Verification
from gossamer.view.display.plain import lines_of
from gossamer.view.progress import RunProgress
from gossamer.view.run_directory import RunDirectory
from gossamer.view.tail import Tail
from gossamer.view.watch.liveness import RunState, state_of
from gossamer.view.watch.log_end import LogEnd

NEWS = 500  # kept
BLOCK_BYTES = 2 << 20  # of records, read at one time: a long run must not keep the keys waiting


@dataclass(frozen=True, slots=True)
class News:
    """What a record other than a step says. `level`: "info" | "warning" | "error"."""

    time_s: float
    level: str
    word: str
    text: str


@dataclass(slots=True)
class WatchedRun:
    """The state of a run according to the files of its directory. `read` is the only way to change it."""

    directory: RunDirectory
    state: RunState = field(default_factory=lambda: RunState("empty"))
    progress: RunProgress = field(default_factory=RunProgress)
    plan: Plan | None = None
    config: RunConfig | None = None
    unread: dict[str, str] = field(default_factory=dict)  # file name -> why it could not be read
    news: deque[News] = field(default_factory=lambda: deque(maxlen=NEWS))
    sent_bytes: dict[str, int] = field(default_factory=dict)  # by link, since the run began
    islands: Islands | None = None  # the newest
    last_s: float = 0.0  # time of the last record; 0: none
    is_behind: bool = True  # more records are there than were read
    _tail: Tail = field(init=False)
    _versions: dict[str, tuple[int, int]] = field(default_factory=dict)  # file name -> change time and size
    _logs: dict[int, LogEnd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tail = Tail(self.directory.records_file, most_bytes=BLOCK_BYTES)

    def read(self, now_s: float) -> bool:
        """Read what was added since the last time, at most BLOCK_BYTES of it; return whether there was anything.

        `now_s`: the present time, in seconds since the epoch.
        """
        records = self._tail.read()
        for record in records:
            self._add(record)
        self.is_behind = self._tail.is_behind
        self.state = state_of(self.directory.path, self.progress, last_s=self.last_s, now_s=now_s)
        return self._read_files() or bool(records)

    def log(self, rank: int) -> LogEnd:
        """Return the end of the log of `rank`, read anew where it has changed."""
        log = self._logs.setdefault(rank, LogEnd(self.directory.log_file(rank)))
        log.read()
        return log

    @property
    def ranks(self) -> int:
        """The number of ranks, as the start says it, or else the plan, or else the logs; 0: not known yet."""
        if self.progress.start is not None:
            return self.progress.start.ranks
        if self.plan is not None:
            return self.plan.ranks
        return len(list((self.directory.path / "logs").glob("rank-*.log")))

    def host_of(self, rank: int) -> int | None:
        """Return the host of `rank`, counted from 0; None where the records do not say it."""
        start = self.progress.start
        return start.hosts[rank] if start is not None and rank < len(start.hosts) else None

    def _add(self, record: Record) -> None:
        self.progress.add(record)
        self.last_s = record.time_s
        if isinstance(record, Step):
            for link, count in record.wire_bytes.items():
                self.sent_bytes[link] = self.sent_bytes.get(link, 0) + count
            if not record.committed:
                said = f"step {record.step}: loss {record.loss:g}, gradient {record.grad_norm:g}"
                self.news.append(News(record.time_s, "warning", "rejected", said))
            return
        if isinstance(record, Islands):
            self.islands = record
        if isinstance(record, Verification) and record.named:
            said = f"step {record.step}: outvoted: rank {', '.join(map(str, record.named))}"
            self.news.append(News(record.time_s, "error", "verified", said))
        inside = f"{self.directory.path.resolve()}/"  # who looks at a run knows where it is
        for word, text in lines_of(record):
            text = text.replace(inside, "")
            self.news.append(News(record.time_s, _level(record), word, text))

    def _read_files(self) -> bool:
        """Read plan.yaml and run.yaml where they have changed; one that cannot be read is said, not raised."""
        is_new = False
        for file in (self.directory.plan_file, self.directory.config_file):
            version = _version(file)
            if version is None or version == self._versions.get(file.name):
                continue
            self._versions[file.name], is_new = version, True
            self.unread.pop(file.name, None)
            try:
                if file == self.directory.plan_file:
                    self.plan = self.directory.plan()
                else:
                    self.config = self.directory.config()
            except BadInput as error:
                self.unread[file.name] = str(error)
        return is_new


def _level(record: Record) -> str:
    if isinstance(record, Event):
        return record.level
    if isinstance(record, Evaluation):
        return "info"
    outcome, error = getattr(record, "outcome", ""), getattr(record, "error", "")
    return "error" if error or outcome == "failed" else "info"


def _version(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
