"""The report of a run: one HTML file to hand around, and the same as Markdown. Neither needs a network or a program.

A report is a list of blocks (`blocks`, `chart`), each of which writes itself in both forms; `sections` makes the blocks
from a run's history. What a run says is anybody's text: `escaping` is the only way of it into a page.
"""

from gossamer.view.report.write import ReportFiles, write_report

__all__ = ["ReportFiles", "write_report"]
