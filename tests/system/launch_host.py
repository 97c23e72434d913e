"""One host of a meeting, for tests: python launch_host.py JSON [--node-rank I --nnodes N --rdzv-endpoint HOST:PORT].

Prints what it was told; exits as a command would. JSON may be the name of a file that holds it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gossamer.launch import HostFingerprint, HostMeeting, LaunchRequest, Limits, RendezvousConfig, launch_met
from gossamer.launch.rendezvous_config import Node
from gossamer.spec.errors import BadInput, RunFailed

DEFAULTS = {
    "interface": "auto",
    "processes": 2,
    "versions": {"gossamer": "0.1.0"},
    "config": "c",
    "data": "d",
    "checkpoints": [],
    "within_s": 30.0,
    "worker": ["0.05", "6", "none"],
    "run": "r",
    "hosts": 2,
    "settle_s": 20.0,
    "progress_timeout_s": 60.0,
}


def main() -> int:
    text = sys.argv[1] if sys.argv[1].startswith("{") else Path(sys.argv[1]).read_text()
    given = {**DEFAULTS, **json.loads(text)}
    if "--node-rank" in sys.argv:
        rank, nodes, endpoint = (
            sys.argv[sys.argv.index(option) + 1] for option in ("--node-rank", "--nnodes", "--rdzv-endpoint")
        )
        node = Node.parse(int(rank), int(nodes), endpoint)
        given |= {"host": node.rank, "hosts": node.nodes, "address": node.address, "port": node.port}
        given["runs"] = given["runs"].replace("{host}", str(given["host"]))
    call = RendezvousConfig(
        host=given["host"],
        hosts=given["hosts"],
        address=given["address"],
        port=given["port"],
        facts=HostFingerprint(
            processes=given["processes"],
            versions=given["versions"],
            config=given["config"],
            data=given["data"],
            checkpoints=tuple(given["checkpoints"]),
        ),
        runs=Path(given["runs"]),
        run=given["run"],
        interface=given["interface"],
        within_s=given["within_s"],
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )

    def start(meeting: HostMeeting) -> LaunchRequest:
        print("MEETING", meeting.among, flush=True)
        worker = str(Path(__file__).with_name("launch_worker.py"))
        return LaunchRequest(
            argv=(sys.executable, worker, *given["worker"]),
            processes=given["processes"],
            rundir=meeting.rundir,
            limits=Limits(
                heartbeat_s=1.0,
                progress_timeout_s=given["progress_timeout_s"],
                settle_s=given["settle_s"],
                kill_s=0.5,
            ),
        )

    try:
        outcome = launch_met(call, start)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except RunFailed as error:
        print(error, file=sys.stderr)
        return 3
    print("OUTCOME", outcome.text, flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
