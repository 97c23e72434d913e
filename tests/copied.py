"""Commands of the tests as copies of a process that has their imports already (`gossamer.process.template`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.process._template import ForkRequest
from gossamer.process.template import Template


class CopiedCommand(subprocess.Popen[str]):
    """As `subprocess.Popen` of the template's program in `folder`, with pipes for what it reads and writes.

    has_errors: also for its errors, which else go where ours do.
    """

    def __init__(
        self, template: Template, argv: Sequence[str], *, folder: Path, env: Mapping[str, str], has_errors: bool
    ) -> None:
        self._asked = template, ForkRequest(arguments=tuple(argv), env=env, folder=str(folder), descriptors=(0, 1, 2))
        pipe, errors = subprocess.PIPE, subprocess.PIPE if has_errors else None
        super().__init__(["copy"], stdin=pipe, stdout=pipe, stderr=errors, text=True)

    def _execute_child(self, *given: Any) -> None:
        """Fill in `pid` (given: as in Python 3.10 to 3.14; 10, 13 and 15 are the copy's ends of pipes, -1: none)."""
        template, request = self._asked
        ends = [given[10], given[13], given[15]]
        self.pid = template.fork(request, [number if end < 0 else end for number, end in enumerate(ends)])
        self._child_created = True
        for end in ends:
            if end >= 0:
                os.close(end)
