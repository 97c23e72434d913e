"""The report of a run: all of it is there, whatever a run says is shown and not obeyed, and long runs stay small."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.records import End, Event, Record, Sample
from gossamer.view.report import write_report
from gossamer.view.report.escaping import markdown_code, markdown_text
from gossamer.view.report.thinning import Points
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_history import RunHistory
from gossamer.view.run_lock import held
from view.streams import run, start, step

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)> \"'` | [a](javascript:b) \x1b[2J \u202e &amp; https://x.y"
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "a", "div", "header", "h1", "p", "nav", "ul", "li", "main"),
    *("section", "h2", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "figure", "figcaption", "span"),
    *("svg", "path", "details", "summary", "pre", "code", "footer"),
}


class Elements(HTMLParser):
    """The elements of a page with their attributes; checks that each is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def reported(folder: Path, records: Iterable[Record], out: Path | None = None) -> tuple[str, str]:
    """The pages of a run of these records."""
    directory = RunDirectory(folder)
    directory.keep(RunConfig.model_validate({"model": {"hf": "llama"}, "train": {"steps": 60}}), {"train.steps": "a:1"})
    forecast = Cost(step_s=0.4, compute_s=0.4, state_bytes=(1 << 20,), wire_bytes={"0>1": 12_600_000})
    directory.keep_plan(Plan(rows=(8,), microbatches=(1,), reasons={"exchange": "links are fast"}, forecast=forecast))
    with directory.records_file.open("a") as file:
        file.writelines(record.line() + "\n" for record in records)
    made = write_report(RunHistory.read(directory), out or folder / "report.html")
    assert made.html_bytes == made.html.stat().st_size
    return made.html.read_text("utf-8"), made.markdown.read_text("utf-8")


def test_every_section_is_there_in_both_forms(tmp_path: Path) -> None:
    html, markdown = reported(tmp_path / "run", run(200))
    titles = (
        *("Result", "What ran", "Why it ran this way", "Loss", "Speed", "Bytes per link", "Memory"),
        *("Forecast and measurement", "Events and failures", "Checkpoints", "What it wrote", "Run it again"),
    )
    for title in titles:
        assert f">{title}</h2>" in html and f"\n## {title}\n" in markdown
    for fact in ("links are fast", "3,150,000 parameters", "loss was nan: step rejected", "gossamer train"):
        assert fact in html and fact in markdown
    assert "+25.0%" in html and "| step | 400 ms | 500 ms | +25.0% |" in markdown, "forecast beside measurement"


def test_the_page_loads_nothing_and_serves_the_keyboard(tmp_path: Path) -> None:
    html, _ = reported(tmp_path / "run", run(200))
    page = Elements(html)
    assert {tag for tag, _ in page.found} <= ALLOWED
    ids = {attrs["id"] for _, attrs in page.found if "id" in attrs}
    for tag, attrs in page.found:
        assert not {"src", "srcset", "onload", "onclick"} & set(attrs)
        if "href" in attrs:
            assert tag == "a" and (attrs["href"] or "").removeprefix("#") in ids, "links lead within the page"
        if tag == "svg":
            assert attrs["role"] == "img" and attrs["aria-label"]
        if attrs.get("class") == "scroll" or tag == "pre":
            assert attrs["tabindex"] == "0" and attrs["aria-label"], "what scrolls can be reached with the Tab key"
    assert "url(" not in html and "@import" not in html and "prefers-color-scheme: dark" in html
    assert "default-src &#x27;none&#x27;" in html


def test_what_a_run_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    records: list[Record] = [
        replace(start(0, 4), model=EVIL, data=EVIL, exchange=EVIL, versions={EVIL: EVIL}, machine={"host": EVIL}),
        *(replace(step(n), wire_bytes={EVIL: 5}) for n in range(1, 5)),
        Event(level=EVIL, message=EVIL),
        Sample(step=4, prompt="```\n", text=f"{EVIL}\n</code></pre>\n````"),
        End(step=4, outcome="failed", message=EVIL),
    ]
    html, markdown = reported(tmp_path / "run", records)
    page = Elements(html)
    assert {tag for tag, _ in page.found} <= ALLOWED
    assert not any(name.startswith("on") for _, attrs in page.found for name in attrs)
    assert any("<script>alert(1)</script>" in text for text in page.texts), "as text"
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", markdown, flags=re.M | re.S)
    assert "<script" not in outside and "<img" not in outside and "https://" not in outside
    assert not re.search(r"(?<!\\)\]\(", outside), "no link"
    assert "\x1b" not in html + markdown and "\u202e" not in html + markdown


def test_markdown_text_stays_in_its_cell_and_code_in_its_fence() -> None:
    assert markdown_text("a|b\n- *c*") == "a\\|b - \\*c\\*"
    assert markdown_text("# no heading") == "&#35; no heading" and markdown_text("1. no list") == "&#49;. no list"
    assert markdown_text("2.450 bits/byte") == "2.450 bits/byte"
    assert markdown_code("```\nx\n````\n").splitlines()[0] == "`````text"


def test_thinned_curves_keep_their_extremes() -> None:
    noise = random.Random(0)
    ys = [noise.random() for _ in range(10_000)]
    ys[4_321], ys[7_654] = 9.0, -9.0
    whole = Points.of(list(range(10_000)), ys)
    few = whole.extremes(50)
    assert len(few) <= 200 and (4_321, 9.0) in zip(few.xs, few.ys, strict=True)
    assert (7_654, -9.0) in zip(few.xs, few.ys, strict=True) and (few.xs[0], few.xs[-1]) == (0, 9_999)
    means = whole.means(50)
    assert len(means) == 50 and sum(means.ys) / 50 == pytest.approx(sum(ys) / 10_000)
    assert len(Points.of([1, 2, 3], [1.0, float("nan"), float("inf")])) == 1


def test_a_long_run_gives_a_small_page_with_its_spike(tmp_path: Path) -> None:
    many = (step(n, loss=2.0 + (7.25 if n == 12_345 else 0.001 * (n % 7))) for n in range(1, 20_001))
    html, markdown = reported(tmp_path / "run", [start(0, 20_000), *many])
    assert len(html) < 300_000 and len(markdown) < 30_000
    assert "most 9.25" in html


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no record yet"),
        ('{"kind":"comet","time_s":1.0}\n', "does not know"),
        (start(0, 4).line() + "\n" + step(1).line()[:50], "cut short"),
    ],
)
def test_damaged_and_empty_runs_are_reported(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "records.jsonl").write_text(text)
    made = write_report(RunHistory.read(RunDirectory(tmp_path)), tmp_path / "report.html")
    assert said in made.html.read_text("utf-8") and said in made.markdown.read_text("utf-8")


def test_a_run_that_trains_and_one_that_was_lost_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    html, _ = reported(folder, run(20, ends=False))
    assert "The records have no end" in html and "gossamer resume" in html
    log = RunDirectory(folder).log_file(0)
    log.parent.mkdir()
    log.write_text("line\n" * 1000 + "MemoryError: <b>\n")
    with held(folder):
        html, _ = reported(folder, [])
        assert "Still being trained, by process" in html and "MemoryError" not in html
    html, _ = reported(folder, [])
    assert "MemoryError: &lt;b&gt;" in html and html.count("line\n") < 25, "the end of the log"


def test_a_loss_that_is_not_finite_is_counted(tmp_path: Path) -> None:
    html, _ = reported(tmp_path / "run", [start(0, 9), *(step(n) for n in range(1, 9)), step(9, loss=float("nan"))])
    assert "Losses that are not finite, and not drawn: 1." in html


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--out: wanted a file named \.html"):
        reported(tmp_path / "run", run(4), tmp_path / "report.pdf")
    with pytest.raises(BadInput, match=r"cannot write the report .*: No such file or directory: name a file"):
        reported(tmp_path / "run", [], tmp_path / "none" / "report.html")
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(BadInput, match=r"cannot write the report .*: Not a directory: name a file"):
        reported(tmp_path / "run", [], tmp_path / "README.md" / "report.html")
    with pytest.raises(BadInput, match=r"README\.md, got a file of that name, which is no report: give another name"):
        reported(tmp_path / "run", [], tmp_path / "README.html")
    assert (tmp_path / "README.md").read_text() == "mine" and not (tmp_path / "README.html").exists()
    for _ in range(2):  # a report replaces a report
        reported(tmp_path / "run", [], tmp_path / "report.html")


def test_the_command_writes_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reported(tmp_path / "runs" / "a", run(20), tmp_path / "other.html")
    assert main(["report", str(tmp_path / "runs" / "a"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["html"] == str(tmp_path / "runs" / "a" / "report.html") and Path(data["markdown"]).is_file()
