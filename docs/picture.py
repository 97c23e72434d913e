"""Draw the live display of a run: `python docs/picture.py RUN_DIR [STEP]` writes docs/images/display.svg."""

import sys
from pathlib import Path

from gossamer.view.run_directory import open_run
from gossamer.view.screenshot import picture_of_run

if __name__ == "__main__":
    step = int(sys.argv[2]) if len(sys.argv) > 2 else None
    picture_of_run(open_run(Path(sys.argv[1])), Path(__file__).parent / "images" / "display.svg", until_step=step)
