"""Runs side by side: what makes them incomparable is said first, and figures are of the last common point."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.records import Evaluation, Record, Start
from gossamer.view.comparison import Comparison
from gossamer.view.comparison_text import comparison_text
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_history import RunHistory
from gossamer.view.screen import Screen
from gossamer.view.text_chart import Line, text_chart
from view.streams import run, start, step

SAME = "f" * 64


def history(folder: Path, records: Iterable[Record], **settings: object) -> RunHistory:
    directory = RunDirectory(folder)
    directory.keep(RunConfig.model_validate({"train": settings} if settings else {}), {})
    directory.keep_plan(Plan(rows=(8,), microbatches=(1,)))
    for record in records:
        directory.append(record)
    return RunHistory.read(directory)


def marked(records: Iterable[Record], **fields: object) -> list[Record]:
    """The records with other fields in their start."""
    return [replace(one, **fields) if isinstance(one, Start) else one for one in records]  # type: ignore[arg-type]


def test_figures_are_of_the_last_common_step(tmp_path: Path) -> None:
    one = history(tmp_path / "a", marked(run(200), data_fingerprint=SAME))
    other = history(tmp_path / "b", marked(run(200, until=120), data_fingerprint=SAME))
    found = Comparison.of([one, other])
    assert (found.axis, found.at, found.evaluated_at, found.is_same_data) == ("steps", 120, 100, True)
    assert all(first == second for first, second in (figure.values for figure in found.figures)), "the same steps"
    figures = {(figure.name, figure.unit): figure.values for figure in found.figures}
    wanted = sum(step(number).loss for number in range(116, 121)) / 5
    assert figures["loss", "nats/token"][0] == pytest.approx(wanted)
    assert figures["throughput", "tokens/s"][0] == pytest.approx(4096 / 0.5)
    assert figures["sent per step", "bytes"][0] == 12_602_048
    assert found.warnings == () and found.differences == ()


def test_other_data_and_units_are_said_first(tmp_path: Path) -> None:
    one = history(tmp_path / "a", marked(run(20), data_fingerprint=SAME))
    other = history(tmp_path / "b", marked(run(20), data_fingerprint="e" * 64, data="text:b", loss_unit=""))
    found = Comparison.of([one, other])
    assert found.is_same_data is False
    assert found.warnings[0].startswith(
        "The training data differ, in their text, split or tokenizer: A stdlib (ffffffff)"
    )
    assert found.warnings[1] == "The losses have different units (A nats/token, B unknown): they cannot be compared."
    assert comparison_text(found, Screen(80)).startswith("! The training data differ")
    unknown = history(tmp_path / "c", run(20))
    assert Comparison.of([one, unknown]).is_same_data is None
    assert "no fingerprint of B" in Comparison.of([one, unknown]).warnings[0]


def test_fingerprints_of_earlier_runs_are_in_their_files(tmp_path: Path) -> None:
    one = history(tmp_path / "a", run(4))
    (tmp_path / "a" / "data.json").write_text(json.dumps({"fingerprint": SAME, "files": {}}))
    assert one.fingerprint == "" and RunHistory.read(one.run).fingerprint == SAME
    other = history(tmp_path / "b", run(4))
    folder = other.run.checkpoints / "step-00000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"body": {"parts": [{"meta": {"data": "e" * 64}}]}}))
    assert RunHistory.read(other.run).fingerprint == "e" * 64


def test_only_what_differs_is_listed(tmp_path: Path) -> None:
    one = history(
        tmp_path / "a", marked(run(4), versions={"torch": "2.12", "python": "3.11"}, machine={"host": "a"}), batch=32
    )
    other = history(tmp_path / "b", marked(run(4), versions={"torch": "2.13", "python": "3.11"}), batch=64)
    other.run.keep_plan(Plan(rows=(16,), microbatches=(2,)))
    found = Comparison.of([one, RunHistory.read(other.run)])
    assert [(d.section, d.key, d.values) for d in found.differences] == [
        ("configuration", "train.batch", ("32", "64")),
        ("plan", "rows", ("[8]", "[16]")),
        ("plan", "microbatches", ("[1]", "[2]")),
        ("versions", "torch", ("2.12", "2.13")),
    ]


def test_runs_of_other_batches_are_compared_by_tokens(tmp_path: Path) -> None:
    one = history(tmp_path / "a", run(100))
    half = [replace(s, tokens=2048) for s in (step(n) for n in range(1, 101))]
    other = history(tmp_path / "b", [*marked([start(0, 100)], tokens_per_step=2048), *half])
    found = Comparison.of([one, other])
    assert (found.axis, found.at) == ("tokens", 2048 * 100)
    assert next(figure.values for figure in found.figures if figure.name == "steps") == (50, 100)


def test_runs_of_no_use_are_refused(tmp_path: Path) -> None:
    one = history(tmp_path / "a", run(4))
    with pytest.raises(BadInput, match="wanted 2 to 26 runs, got 1"):
        Comparison.of([one])
    with pytest.raises(BadInput, match="wanted different runs, got a twice"):
        Comparison.of([one, RunHistory.read(RunDirectory(tmp_path / "a"))])


def test_an_empty_and_a_damaged_run_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    one = history(tmp_path / "a", run(4))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "records.jsonl").write_text('{"kind":"comet","time_s":1.0}\n{"kind":"start","ti')
    (tmp_path / "b" / "plan.yaml").write_text("format: 99\n")
    found = Comparison.of([one, RunHistory.read(RunDirectory(tmp_path / "b"))])
    said = "\n".join(found.warnings)
    for part in ("B has no step yet", "cut short", "does not know", "There is no run.yaml", "The plan is left out"):
        assert part in said
    assert found.at is None and "At " not in comparison_text(found, Screen(80))
    assert found.differences == (), "what is not known does not differ"
    assert found.compared == () and "Nothing differs in what is known of them." in comparison_text(found, Screen(80))


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("is_unicode", [True, False])
def test_text_fits_the_screen(tmp_path: Path, columns: int, is_unicode: bool) -> None:
    runs = [
        history(tmp_path / name, marked(run(60), model=f"a model with a name that is {name} long\x1b[2J" * 2))
        for name in ("20261125-130118-vera-pipe-and-more-of-its-name", "b", "c")
    ]
    lines = comparison_text(Comparison.of(runs), Screen(columns, is_unicode)).splitlines()
    assert max(map(len, lines)) <= columns and all(line.isprintable() for line in lines)
    assert is_unicode or all(line.isascii() for line in lines)


def test_each_curve_is_drawn_with_its_letter() -> None:
    xs = [float(x) for x in range(1, 101)]
    drawn = text_chart([Line(xs, xs), Line(xs, xs[::-1])], Screen(50), x_name="steps", rows=9)
    assert drawn[0].endswith("A") and "B" in drawn[0] and "*" in drawn[4]
    assert drawn[8].count("A") and drawn[-1].endswith("100 steps")
    assert text_chart([Line([1.0, 2.0], [math.nan, math.inf])], Screen(50), x_name="steps") == []
    assert "A" in "".join(text_chart([Line([5.0], [2.0])], Screen(50), x_name="steps")), "one point"


def test_the_command_answers_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        history(tmp_path / name, [*run(60), Evaluation(step=60, loss=1.0, bits_per_byte=1.5, sequences=2, seconds=0.1)])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["at"] == 60 and data["evaluated_at"] == 60 and len(data["curves"]) == 2
    assert {"name": "validation", "unit": "bits/byte", "values": [1.5, 1.5]} in data["figures"]
    assert main(["compare", str(tmp_path / "a")]) == 2
    assert "wanted 2 to 26 runs" in capsys.readouterr().err
