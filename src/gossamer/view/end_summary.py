"""The closing panels of commands: the summary of a run, and the result of the demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gossamer.spec.units import show_bytes, show_gib, show_seconds
from gossamer.view.format import ACCENT, GOOD, SECOND, WARN, show_share

_STROKE, _HALF = "\u2501", "\u2578"
_SAMPLE_LINES = 12
_NAMES = {"compute_s": "compute", "exposed_s": "exposed", "step_s": "step", "peak_bytes": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A baseline for the model: the bits per byte of another code for the same validation text; `note` explains it."""

    name: str
    bits_per_byte: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The contents of the last panel of `gossamer demo`: bits per byte, a sample, the checkpoint.

    `try_next` is pairs (command, what it does).
    """

    bits_per_byte: float
    references: tuple[Reference, ...]
    prompt: str
    sample: str
    checkpoint: str
    seconds: float
    checkpoint_note: str = ""  # what was done to be sure of it
    try_next: tuple[tuple[str, str], ...] = ()
    outlook: str = ""  # what a longer run would reach, and how long it takes here


def demo_panel(result: DemoResult, *, width: int = 80) -> RenderableType:
    """Draw the demo's result: bars of bits per byte (short is good), a sample, the checkpoint, and what to try next."""
    inner = min(width, 100) - 4
    parts: list[RenderableType] = [
        Text("Bits to tell one byte of text the model has not seen (shorter is better)", style="dim"),
        Text(),
        _bars(result, inner),
        Text(),
        _verdict(result),
    ]
    if result.outlook:
        parts.append(Text(result.outlook, style="dim"))
    parts += [Text(), Text("What it writes now", style="bold"), _sample(result), Text()]
    parts += [Text("Where it is", style="bold"), Text(f"  {result.checkpoint}")]
    if result.checkpoint_note:
        parts.append(Text(f"  {result.checkpoint_note}", style="dim"))
    if result.try_next:
        parts += [Text(), Text("Try next", style="bold"), *_commands(result.try_next, inner)]
    return Panel(
        Group(*parts),
        title=Text(f"gossamer demo, {show_seconds(round(result.seconds))}", style="bold"),
        title_align="left",
        box=box.ROUNDED,
        border_style=GOOD,
        width=inner + 4,
        padding=(1, 1),
    )


def _bars(result: DemoResult, width: int) -> Table:
    model = Reference(name="this model", bits_per_byte=result.bits_per_byte, note="trained just now")
    rows = sorted((*result.references, model), key=lambda row: -row.bits_per_byte)
    longest = max(max(row.bits_per_byte for row in rows), 1e-9)
    names, notes = max(len(row.name) for row in rows), max(len(row.note) for row in rows)
    room = max(10, width - names - 4 - notes - 6)
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        style = f"bold {ACCENT}" if row is model else SECOND
        name = Text(row.name, style=f"bold {ACCENT}" if row is model else "")
        length = bar(row.bits_per_byte / longest, room)
        table.add_row(
            name,
            Text(f"{row.bits_per_byte:.2f}", style="bold" if row is model else ""),
            Text(length, style=style),
            Text(row.note, style="dim"),
        )
    return table


def bar(share: float, width: int) -> str:
    """Return a bar of `share` (0 to 1) of `width` characters, to half a character."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    return _STROKE * (halves // 2) + _HALF * (halves % 2)


def _verdict(result: DemoResult) -> Text:
    below = [row.name for row in result.references if result.bits_per_byte < row.bits_per_byte]
    above = [row.name for row in result.references if result.bits_per_byte >= row.bits_per_byte]
    text = Text()
    if below:
        text.append("Better than ").append(_and(below), style=f"bold {GOOD}").append(".")
    if above:
        text.append(" Not yet better than " if below else "Not yet better than ")
        text.append(_and(above), style=f"bold {WARN}").append(".")
    return text


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sample(result: DemoResult) -> RenderableType:
    clean = "".join(c if c.isprintable() or c == "\n" else "?" for c in result.sample).rstrip()
    lines = clean.split("\n")
    shown = "\n".join(lines[:_SAMPLE_LINES]) + ("\n..." if len(lines) > _SAMPLE_LINES else "")
    return Padding(Text.assemble((result.prompt, f"bold {ACCENT}"), shown), (0, 2))


def _commands(pairs: tuple[tuple[str, str], ...], width: int) -> list[RenderableType]:
    """Return command and explanation side by side where the width allows it for all, else one below the other."""
    left = max(len(command) for command, _ in pairs) + 4
    if left + max(len(does) for _, does in pairs) <= width:
        return [Text.assemble((f"  {command:<{left - 2}}", ACCENT), (does, "dim")) for command, does in pairs]
    return [Text.assemble((f"  {command}\n", ACCENT), (f"      {does}", "dim")) for command, does in pairs]


def run_panel(summary: Mapping[str, Any], *, width: int = 80) -> RenderableType:
    """Draw the summary of a run (`summarise`) as a table; a forecast in the plan is compared with it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path can be copied whole
    for label, value in _closing_rows(summary):
        table.add_row(Text(label, style="dim"), Text(value))
    parts: list[RenderableType] = [table]
    if summary["forecast_error"]:
        parts += [Text(), _comparison(summary)]
    colour = {"done": GOOD, "failed": "color(160)"}.get(summary["outcome"], WARN)
    title = Text(f"{summary['run']}: {summary['outcome']}", style="bold", overflow="ellipsis")
    return Panel(
        Group(*parts), title=title, title_align="left", box=box.ROUNDED, border_style=colour, width=min(width, 100)
    )


def _closing_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("steps", f"{summary['steps']:,} of {summary['steps_wanted'] or 0:,} in {show_seconds(summary['seconds'])}")
    ]
    if summary["final_loss"] is not None:
        rows.append(("loss", f"{summary['final_loss']:.4f}"))
    if summary["validation_loss"] is not None:
        bits = summary["validation_bits_per_byte"]
        rows.append(
            ("validation", f"{bits:.3f} bits/byte" if bits is not None else f"loss {summary['validation_loss']:.4f}")
        )
    if summary["tokens_per_s"] is not None:
        peak = f", {show_share(summary['of_peak'])} of measured peak" if summary["of_peak"] is not None else ""
        rows.append(("tokens/s", f"{summary['tokens_per_s']:,.0f}{peak}"))
    sent = sum(summary["wire_bytes"].values())
    if sent:
        share = summary["exposed_share"]
        waited = f", {show_share(share)} of the time exposed" if share is not None else ""
        rows.append(("sent", f"{show_bytes(sent)} by the first rank{waited}"))
    if summary["rejected_steps"]:
        rows.append(("rejected", f"{summary['rejected_steps']} steps"))
    if summary["checkpoint"] is not None:
        rows.append(("checkpoint", summary["checkpoint"]))
    return rows + ([("message", summary["message"])] if summary["message"] else [])


def _comparison(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    for column, justify in (("", "left"), ("forecast", "right"), ("measured", "right"), ("off by", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, error in summary["forecast_error"].items():
        said, was = (_shown(name, summary[side]) for side in ("forecast", "measured"))
        table.add_row(
            Text(_NAMES.get(name, name.replace("wire_bytes", "link"))),
            said,
            was,
            Text(f"{100 * error:+.1f}%", style=WARN if abs(error) > 0.15 else GOOD),
        )
    return table


def _shown(name: str, cost: Mapping[str, Any]) -> str:
    if name.startswith("wire_bytes "):
        return show_bytes(cost["wire_bytes"][name.removeprefix("wire_bytes ")])
    return show_gib(cost["peak_bytes"][0]) if name == "peak_bytes" else show_seconds(cost[name])
