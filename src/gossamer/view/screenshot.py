"""Pictures of the live display, drawn from a run directory: the README shows runs that took place."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import TerminalTheme

from gossamer.spec.records import Step
from gossamer.view.live_panel import panel
from gossamer.view.progress import RunProgress
from gossamer.view.run_directory import RunDirectory

_NORMAL = [
    (0x2B, 0x30, 0x3B), (0xD7, 0x5F, 0x5F), (0x87, 0xAF, 0x5F), (0xD7, 0xAF, 0x5F),
    (0x5F, 0x87, 0xD7), (0xAF, 0x87, 0xD7), (0x5F, 0xAF, 0xAF), (0xC8, 0xCE, 0xD6),
]  # fmt: skip
DARK = TerminalTheme((0x16, 0x1B, 0x22), (0xD5, 0xDB, 0xE3), _NORMAL)
LIGHT = TerminalTheme((0xFC, 0xFC, 0xFA), (0x24, 0x29, 0x2F), _NORMAL)

# rich's own template loads a font from a server; this one uses what the reader has, a twentieth larger than rich's
# 20 pixels: then the strokes of a frame reach from line to line.
_SVG = """<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 21px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture_of_run(
    run: RunDirectory, file: Path, *, width: int = 80, until_step: int | None = None, theme: TerminalTheme = DARK
) -> None:
    """Write an SVG of the live display at the time step `until_step` was recorded (default: at the end)."""
    progress, now_s = RunProgress(), 0.0
    for record in run.records():
        progress.add(record)
        now_s = record.time_s
        if isinstance(record, Step) and record.step == until_step:
            break
    picture(panel(progress, width=width, height=40, now_s=now_s, title=run.name), file, width=width, theme=theme)


def picture(shown: RenderableType, file: Path, *, width: int = 80, theme: TerminalTheme = DARK) -> None:
    """Write an SVG of anything that can be printed, `width` characters wide. It loads no fonts or other resources."""
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(shown)
    svg = console.export_svg(title="", theme=theme, code_format=_SVG, unique_id="gossamer")
    file.write_text(svg, "utf-8")
