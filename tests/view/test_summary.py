"""Summaries, and the closing panels and pictures made from them."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from gossamer.spec.cost import Cost
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.spec.records import Record
from gossamer.view.end_summary import DemoResult, Reference, bar, demo_panel
from gossamer.view.run_directory import RunDirectory
from gossamer.view.screenshot import LIGHT, picture, picture_of_run
from gossamer.view.summary import forecast_error, summarize
from view.streams import STEP_S, run, start, step


def recorded(path: Path, *records: Record, forecast: Cost | None = None) -> RunDirectory:
    directory = RunDirectory(path)
    for record in records:
        directory.append(record)
    if forecast is not None:
        shares = {"batch_fractions": (0.5, 0.5), "rows": (16, 16), "microbatches": (1, 1)}
        directory.keep_plan(Plan(mesh=MeshSizes(replica=2), forecast=forecast, **shares))  # type: ignore[arg-type]
    return directory


def text_of(shown: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(shown)
    return console.export_text()


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    summary = summarize(recorded(tmp_path / "r", *run(200)))
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["run"], summary["outcome"], summary["steps"], summary["tokens"]) == ("r", "done", 200, 200 * 4096)
    assert summary["final_loss"] == step(200).loss
    assert summary["validation_bits_per_byte"] == pytest.approx(2.402, abs=1e-3)
    assert summary["tokens_per_s"] == pytest.approx(4096 / STEP_S)
    assert summary["exposed_share"] == pytest.approx(0.04 / STEP_S)
    assert summary["wire_bytes"]["0>1"] == 200 * 12_600_000
    assert summary["wire_bytes_per_step"] == {"0>1": 12_600_000, "0>2": 2048}
    assert summary["peak_bytes"] == 412 * 2**20
    assert summary["checkpoint"] == "checkpoints/step-00000200"
    assert summary["seconds"] == pytest.approx(100.0)
    assert (summary["forecast"], summary["forecast_error"]) == (None, {})


def test_a_run_without_a_record_has_a_summary(tmp_path: Path) -> None:
    summary = summarize(RunDirectory(tmp_path))
    assert (summary["outcome"], summary["steps"], summary["final_loss"]) == ("unfinished", 0, None)


def test_repeated_steps_count_once_and_their_bytes_twice(tmp_path: Path) -> None:
    first = list(run(100, until=70, ends=False))
    again = list(run(100, first=50))
    pause = [type(r)(**{**r_fields(r), "time_s": r.time_s + 1000}) for r in again]
    summary = summarize(recorded(tmp_path, *first, *pause))
    assert (summary["steps"], summary["tokens"]) == (100, 100 * 4096)
    assert summary["wire_bytes"]["0>2"] == 120 * 2048
    assert summary["seconds"] == pytest.approx((70 + 50) * STEP_S)  # the pause is no work
    assert (summary["starts"], summary["seconds_since_start"]) == (2, pytest.approx(50 * STEP_S))


def r_fields(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__ if name != "kind"}


def test_rejected_steps_are_counted_apart(tmp_path: Path) -> None:
    summary = summarize(recorded(tmp_path, start(), step(1), step(2, committed=False)))
    assert (summary["steps"], summary["rejected_steps"]) == (1, 1)


def test_forecast_and_measurement_side_by_side(tmp_path: Path) -> None:
    forecast = Cost(step_s=0.4, peak_bytes=(400 * 2**20,) * 2, wire_bytes={"0>1": 12_600_000, "1>0": 12_600_000})
    summary = summarize(recorded(tmp_path, *run(50), forecast=forecast))
    assert summary["forecast_error"] == pytest.approx({"step_s": 0.25, "peak_bytes": 0.03, "wire_bytes 0>1": 0.0})


def test_only_what_both_know_is_compared() -> None:
    assert forecast_error(Cost(), Cost(step_s=1.0)) == {}
    assert forecast_error(Cost(step_s=1.0), Cost()) == {}


DEMO = DemoResult(
    bits_per_byte=2.41,
    references=(
        Reference(name="order-0", bits_per_byte=4.61, note="letter frequencies"),
        Reference(name="order-2", bits_per_byte=2.93, note="two letters back"),
        Reference(name="xz -9", bits_per_byte=1.71),
    ),
    prompt="def ",
    sample="f(x):\n    return [x]\x07\n" + "\n".join("pass" for _ in range(30)),
    checkpoint="runs/r/checkpoints/step-00000600",
    seconds=112.0,
    try_next=(("gossamer sample runs/r 'class '", "let it write something else"),),
)


def test_the_demo_says_what_was_passed_and_what_was_not() -> None:
    text = text_of(demo_panel(DEMO))
    assert "Better than order-0 and order-2. Not yet better than xz -9." in text
    order = [text.index(name) for name in ("order-0", "order-2", "this model", "xz -9")]
    assert order == sorted(order)
    assert "def f(x):" in text and "return [x]?" in text and text.count("pass") < 12
    assert DEMO.checkpoint in text and "gossamer sample" in text
    assert max(map(len, text.splitlines())) <= 80


def test_bars_are_as_long_as_their_figures() -> None:
    assert [len(bar(share, 10)) for share in (0.0, 0.04, 0.05, 0.5, 1.0, 7.0)] == [0, 1, 1, 5, 10, 10]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_picture_is_svg_that_loads_nothing(tmp_path: Path, width: int) -> None:
    directory, file = recorded(tmp_path / "run", *run(200)), tmp_path / "live.svg"
    picture_of_run(directory, file, width=width, until_step=120)
    root = ElementTree.parse(file).getroot()
    words = "".join(root.itertext()).replace("\xa0", " ")
    assert "step 120 / 200" in words and "bits/byte" in words
    svg = file.read_text("utf-8")
    assert svg.count("http") == 1 and "@import" not in svg and "url(h" not in svg  # the name of the format itself


def test_the_demo_has_a_picture_in_light_colors(tmp_path: Path) -> None:
    picture(demo_panel(DEMO), tmp_path / "demo.svg", theme=LIGHT)
    assert "#fcfcfa" in (tmp_path / "demo.svg").read_text("utf-8")
