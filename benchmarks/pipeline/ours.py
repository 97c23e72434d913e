"""What one host runs for ours: `python -m pipeline.ours RUN.yaml`, which is `gossamer train RUN.yaml`.

A run's records are rank 0's. Here every host also prints what it metered in each step, and what its kernel counted.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gossamer.cli import main
from gossamer.run.step_reports import StepReports
from pipeline.counted import counted

_said: list[dict[str, Any]] = []
_record = StepReports.record


def _watched(self: StepReports, *about: Any) -> None:
    _said.append({"wire_bytes": self.replica.sent_bytes(), **counted()})
    _record(self, *about)


if __name__ == "__main__":
    StepReports.record = _watched  # type: ignore[method-assign]
    sys.argv = ["gossamer", "train", *sys.argv[1:]]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    print("\n" + json.dumps({"steps": _said}), flush=True)
    sys.exit(code)
