"""The rows for people."""

from __future__ import annotations

from typing import Any

_HEADS = (
    "method",
    "hosts",
    "rate",
    "RTT ms",
    "s/step",
    "MB/step",
    "exposed",
    "of free",
    "at floor",
    "loss",
    "to target",
)

_NOTES = (
    "* ours; of free: tokens/s as a share of dense on links that are not shaped; at floor: that share at a step of",
    "what a host alone takes, what codes and messages take of its processor, and the last bucket's way",
)


def show(rows: list[dict[str, Any]]) -> str:
    """A table, sorted by link and then by speed; what did not run comes last in its link, with its error."""
    ordered = sorted(rows, key=lambda r: (r["hosts"], r["round_trip_ms"], r["rate"], r["step_s"] or float("inf")))
    lines = [_line(_HEADS)]
    for row in ordered:
        cells = [
            ("" if row["peer"] else "* ") + row["method"],
            str(row["hosts"]),
            row["rate"] + (f" ({row['between']} between)" if row["between"] else ""),
            f"{row['round_trip_ms']:g}",
            _number(row["step_s"], "{:.3f}"),
            _number(row["wire_bytes"], "{:.2f}", 1e-6),
            _number(row["exposed_share"], "{:.1%}"),
            _number(row["share_of_unthrottled"], "{:.1%}"),
            _number(row.get("share_at_floor"), "{:.1%}"),
            _number(row["final_loss"], "{:.4f}"),
            _number(row["seconds_to_target"], "{:.0f} s"),
        ]
        lines.append(_line(cells) + (f"  {row['error']}" if "error" in row else ""))
    return "\n".join([*lines, *_NOTES])


def _line(cells: Any) -> str:
    widths = (26, 6, 10, 7, 9, 9, 9, 9, 9, 8, 10)
    return " ".join(
        f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)
