"""The program of a template process: `python -m gossamer.process._template_main DESCRIPTOR SUPERVISOR MODULE...`."""

from __future__ import annotations

from gossamer.process._template import main

if __name__ == "__main__":
    main()
