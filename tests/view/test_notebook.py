"""The chart of a notebook: drawn once, updated in place, and well-formed whatever is in the records."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.view.display.notebook import Notebook, notebook_show
from gossamer.view.display.plain import Plain
from gossamer.view.loss_chart import HEIGHT, WIDTH, chart
from gossamer.view.open_display import open_display
from gossamer.view.progress import RunProgress
from view.streams import run

SVG = "{http://www.w3.org/2000/svg}"


class Fake:
    """IPython's `display` and the handle it returns."""

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.updates: list[Any] = []

    def __call__(self, data: Any, *, raw: bool, display_id: bool) -> Fake:
        assert raw and display_id
        self.first.append(data["image/svg+xml"])
        return self

    def update(self, data: Any, *, raw: bool) -> None:
        assert raw
        self.updates.append(data["image/svg+xml"])


def test_one_picture_is_updated_while_the_run_goes_on() -> None:
    fake = Fake()
    shown = Notebook(fake, io.StringIO(), title="a <run>")
    for record in run(200):
        shown.show(record)
    shown.close()
    assert len(fake.first) == 1 and 2 < len(fake.updates) < 200, "not at every record"
    root = ElementTree.fromstring(fake.updates[-1])
    (line,) = root.iter(f"{SVG}polyline")
    places = [tuple(map(float, one.split(","))) for one in line.attrib["points"].split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places) and places == sorted(places)
    assert places[0][1] < places[-1][1], "losses fall, and higher ones are above lower ones"
    words = [one.text for one in root.iter(f"{SVG}text")]
    assert words[0].startswith("a <run>, step 200/200, loss") and words[0].endswith("done")
    assert len(list(root.iter(f"{SVG}circle"))) > 0


def test_before_the_first_step_there_is_a_title() -> None:
    root = ElementTree.fromstring(chart(RunProgress(), title="r"))
    assert [one.text for one in root.iter(f"{SVG}text")] == ["r, step 0/0"]


def test_only_a_kernel_gets_the_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert notebook_show() is None, "IPython in a terminal"
    assert isinstance(open_display("auto", out=io.StringIO()).inner, Plain)
    fake = Fake()
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=fake))
    assert isinstance(open_display("auto", out=io.StringIO()).inner, Notebook)
    assert isinstance(open_display("plain", out=io.StringIO()).inner, Plain)
