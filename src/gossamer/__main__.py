"""Entry point of `python -m gossamer`, which is the command `gossamer`."""

from __future__ import annotations

import sys

from gossamer.cli import main

if __name__ == "__main__":
    sys.exit(main())
