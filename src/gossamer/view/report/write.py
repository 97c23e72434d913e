"""The two files of a report."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gossamer.spec.errors import BadInput, bad_input
from gossamer.view.report.blocks import Section
from gossamer.view.report.escaping import html_text, markdown_text
from gossamer.view.report.look import STYLE
from gossamer.view.report.sections import sections
from gossamer.view.run_history import RunHistory

_FOOT = "Written by gossamer report"
# Nothing may be loaded or run, whatever the text of a run brought into the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """The files of a report that was written, with their sizes in bytes."""

    html: Path
    markdown: Path
    html_bytes: int
    markdown_bytes: int


def write_report(run: RunHistory, out: Path) -> ReportFiles:
    """Write the report of a run as HTML to `out`, and as Markdown beside it; each appears completely or not at all.

    Raises BadInput where `out` is not named .html, cannot be written, or one of the two is a file that is no report.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise bad_input(
            wanted="a file named .html", got=str(out), do="the Markdown is written beside it, as .md", key="--out"
        )
    beside = out.with_suffix(".md")
    for file in (out, beside):
        _check_replaceable(file)
    found = list(sections(run))
    html, markdown = html_page(run, found).encode(), markdown_page(run, found).encode()
    for file, content in ((out, html), (beside, markdown)):
        _write(file, content)
    return ReportFiles(out, beside, len(html), len(markdown))


def html_page(run: RunHistory, found: list[Section]) -> str:
    """Return the report as one HTML page that loads nothing."""
    name, about = html_text(run.name), html_text(_about(run))
    links = "".join(f'<li><a href="#{one.name}">{html_text(one.title)}</a></li>' for one in found)
    body = "\n".join(section.html() for section in found)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html_text(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: report of a run</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">To the content</a>\n<div class="page">\n'
        f"<header>\n<h1>{name}</h1>\n<p>{about}</p>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
        f'<main id="content" tabindex="-1">\n{body}\n</main>\n<footer>{html_text(_foot())}</footer>\n</div>\n'
        "</body>\n</html>\n"
    )


def markdown_page(run: RunHistory, found: list[Section]) -> str:
    """Return the report as Markdown."""
    parts = [f"# {markdown_text(run.name)}", markdown_text(_about(run)), *(section.markdown() for section in found)]
    return "\n\n".join([*parts, markdown_text(_foot())]) + "\n"


def _about(run: RunHistory) -> str:
    start = run.start
    if start is None:
        return "A run that has not begun."
    ranks = f"{start.ranks} rank" + ("s" if start.ranks != 1 else "")
    return f"{start.model} on {start.data}, {ranks}: {run.outcome} at step {run.summary['steps']:,}"


def _foot() -> str:
    return f"{_FOOT}, version {version('gossamer')}, from the records of the run."


def _check_replaceable(file: Path) -> None:
    """Raise BadInput for a file that is there already and is no report: notes.html comes with notes.md."""
    try:
        is_other = file.is_file() and _FOOT.encode() not in file.read_bytes()[-1024:]
    except OSError:
        is_other = False  # writing it says what is wrong
    if is_other:
        raise bad_input(
            wanted=f"to write the report {file}",
            got="a file of that name, which is no report",
            do="give another name with --out, or move that file away",
            key="--out",
        )


def _write(file: Path, content: bytes) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, file)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise BadInput(
            f"cannot write the report {file}: {error.strerror or error}: name a file in a folder that can be written",
            key="--out",
        ) from None
