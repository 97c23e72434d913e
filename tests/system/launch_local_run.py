"""A command that launches workers, for tests that send it signals: python launch_local_run.py RUNDIR WORKER_ARGS..."""

import sys
from pathlib import Path

from gossamer.launch import LaunchRequest, Limits, launch_here
from gossamer.launch.local import to_stderr

if __name__ == "__main__":
    worker = str(Path(__file__).with_name("launch_worker.py"))
    outcome = launch_here(
        LaunchRequest(
            argv=(sys.executable, worker, *sys.argv[2:]),
            processes=2,
            rundir=Path(sys.argv[1]),
            limits=Limits(heartbeat_s=1.0, grace_s=20.0),
        )
    )
    to_stderr(outcome.text)
    assert "torch" not in sys.modules, "a supervisor has no use for torch"
    sys.exit(outcome.exit_code)
