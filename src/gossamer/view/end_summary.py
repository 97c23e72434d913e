"""The closing panel of the demo: its result beside simple statistics of the same text."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gossamer.spec.units import show_seconds
from gossamer.view.format import ACCENT, GOOD, SECOND, WARN

_STROKE, _HALF = "\u2501", "\u2578"
_SAMPLE_LINES = 12


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
