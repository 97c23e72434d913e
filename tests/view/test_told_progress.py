"""Lines of what is done before a run's first step: each thing once, and again only after some seconds."""

from __future__ import annotations

from gossamer.spec.records import Event, Record
from gossamer.view.display import Display
from gossamer.view.told_progress import ToldProgress


class Kept(Display):
    def __init__(self) -> None:
        self.said = list[str]()

    def show(self, record: Record) -> None:
        assert isinstance(record, Event) and record.level == "info"
        self.said.append(record.message)

    def recall(self, record: Record) -> None:
        raise AssertionError

    def tick(self) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def test_a_line_when_something_begins_and_then_every_few_seconds() -> None:
    display, now = Kept(), [100.0]
    told = ToldProgress(display=display, whose="phase b", every_s=5.0, clock=lambda: now[0])
    for passed, what, done, total in (
        (0, "reads the data", 0, 0),
        (1, "layers", 0, 9),
        (4.9, "layers", 3, 9),
        (0.2, "layers", 4, 9),
        (1, "layers", 9, 9),
        (1, "losses", 1, 2),
        (6, "losses", 2, 2),
    ):
        now[0] += passed
        told(what, done, total)
    assert display.said == [
        "phase b: reads the data",
        "phase b: layers, 0 of 9",
        "phase b: layers, 4 of 9",
        "phase b: losses, 1 of 2",
        "phase b: losses, 2 of 2",
    ]
