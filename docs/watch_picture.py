"""Draw `gossamer watch` on a run: `python docs/watch_picture.py RUN_DIR [PANE]` writes docs/images/watch.svg."""

import sys
from pathlib import Path

from rich.console import Group
from rich.text import Text

from gossamer.view.screenshot import picture
from gossamer.view.watch.canvas import Canvas
from gossamer.view.watch.panes import PANES, head, tabs
from gossamer.view.watch.run_choice import choose_run
from gossamer.view.watch.watched_run import WatchedRun

WIDTH = 100

if __name__ == "__main__":
    run, canvas = WatchedRun(choose_run(sys.argv[1], Path("runs"))), Canvas(WIDTH)
    pane = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    while run.is_behind:
        run.read(run.last_s)
    run.read(run.last_s)
    drawn = [*head(run, canvas, now_s=run.last_s), tabs(pane, canvas), Text(), *PANES[pane].lines(run, canvas)]
    picture(Group(*drawn), Path(__file__).parent / "images" / "watch.svg", width=WIDTH)
