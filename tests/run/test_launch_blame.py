"""Who is to blame: pure functions over what supervisors know."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gossamer.comm.patience import NoAnswer
from gossamer.launch.control_channel import Done, HostAlive, RankFailed, RankPosition
from gossamer.launch.failure_report import Dated, RankFailure, cause_of_exit, find_root_cause, format_report
from gossamer.launch.supervisor import Site, Supervisor
from gossamer.launch.worker_group import Limits
from gossamer.process import DONE, FAILED, INTERRUPTED, PEER_LOST, EventLoop, Liveness, Position, left_standing, stalled


def failure(rank: int, **given: object) -> RankFailure:
    fields = {"rank": rank, "host": 0, "hostname": "a", "pid": 10 + rank, "what": "exited", "cause": "it died"}
    return RankFailure.model_validate(fields | given)


def dated(at_s: float, rank: int, **given: object) -> Dated:
    return Dated(failure=failure(rank, **given), at_s=at_s)


def test_the_cause_is_the_first_that_is_nobody_elses_fault() -> None:
    found = find_root_cause(
        [
            dated(1.0, 0, exit_code=PEER_LOST),
            dated(1.2, 2, exit_code=3, kind="RuntimeError", message="[gloo] Connection closed by peer [10.0.0.2]:9"),
            dated(1.3, 1, exit_code=-9),
            dated(1.4, 3, exit_code=3, kind="ValueError", message="out of range"),
            dated(1.5, 4, exit_code=-15, by_us=True),
        ]
    )
    assert found.first.rank == 1
    assert [f.rank for f in found.others] == [3]
    assert [f.rank for f in found.collateral] == [0, 2, 4]


def test_a_connection_of_the_users_own_that_breaks_is_a_cause() -> None:
    lost = "[Errno 104] Connection reset by peer"
    found = find_root_cause(
        [
            dated(1.0, 2, exit_code=3, kind="DistBackendError", message=lost),
            dated(1.1, 3, exit_code=3, kind="", message=lost),
            dated(1.2, 1, exit_code=3, kind="ConnectionResetError", message=lost, place="rows.py:7 in fetch"),
            dated(1.3, 0, exit_code=3, kind="BrokenPipeError", message="[Errno 32] Broken pipe"),
        ]
    )
    assert (found.first.rank, found.first.place) == (1, "rows.py:7 in fetch")
    assert [f.rank for f in found.others] == [0]
    assert [f.rank for f in found.collateral] == [2, 3]


def test_with_nothing_but_collateral_ranks_the_first_one_stands_for_the_cause() -> None:
    found = find_root_cause([dated(2.0, 1, exit_code=PEER_LOST), dated(1.0, 0, exit_code=PEER_LOST)])
    assert (found.first.rank, [f.rank for f in found.collateral]) == (0, [1])


def test_ranks_that_only_lost_each_other_are_not_blamed() -> None:
    found = find_root_cause([dated(2.0, 1, exit_code=PEER_LOST, hostname="b"), dated(1.0, 0, exit_code=PEER_LOST)])
    text = " ".join(format_report(found, rundir=Path("runs/x")).replace("|", " ").split())
    assert "none: rank 0 on a; rank 1 on b lost each other; look at the network between their hosts" in text
    assert "lost their peer" not in text
    alone = format_report(find_root_cause([dated(1.0, 0, exit_code=PEER_LOST)]), rundir=Path("runs/x"))
    assert "0 on host a (process 10)" in alone


@pytest.mark.parametrize(
    ("message", "gave_up"),
    [
        ("Timed out waiting 20000ms for recv operation to complete", True),
        ("wait timeout after 120000ms, keys: /0/gloo/all/0/0/1", True),
        (str(NoAnswer("timed out: no answer of the store of the ranks within 125 s")), True),
        ("Connection closed by peer [10.0.0.2]:9", False),
        ("the teacher was lost: raise machines.timeout_s", False),
    ],
)
def test_who_gave_up_waiting_is_known_by_the_words_of_all_that_wait(message: str, gave_up: bool) -> None:
    assert failure(0, exit_code=PEER_LOST, message=message).gave_up_waiting is gave_up
    assert not failure(0, exit_code=-9, message=message).gave_up_waiting


def test_the_page_has_it_all_and_is_a_box_of_ascii() -> None:
    first = failure(1, exit_code=3, cause="ValueError: " + "long words " * 30, step=7, phase="exchange", op="bucket 3")
    found = find_root_cause(
        [Dated(failure=first, at_s=0), dated(1, 2, exit_code=PEER_LOST), dated(1, 0, by_us=True, hostname="b")]
    )
    text = format_report(found, rundir=Path("runs/x"))
    lines = text.splitlines()
    assert text.isascii()
    assert len({len(line) for line in lines}) == 1
    assert all(line[0] in "+|" and line[-1] in "+|" for line in lines)
    for piece in (
        "1 on host a (process 11)",
        "step 7, exchange, last operation bucket 3",
        "rank 2 on a",
        "rank 0 on b",
    ):
        assert piece in text
    assert "gossamer resume runs/x" in text


def test_commands_and_paths_are_never_wrapped() -> None:
    rundir = Path("/" + "very-long-folder/" * 12 + "with a blank/x")
    assert f"gossamer resume {rundir} " in format_report(find_root_cause([dated(0, 0)]), rundir=rundir)


def test_a_kill_is_told_from_a_lack_of_memory() -> None:
    short = cause_of_exit(-9, said="", out_of_memory="control group /g with a limit of 64 MiB", peak="60 MiB")
    assert short == (
        "killed by the kernel for lack of memory: control group /g with a limit of 64 MiB; the rank held 60 MiB at most"
    )
    assert "kill -9" in cause_of_exit(-9, said="", out_of_memory="", peak="60 MiB")
    assert cause_of_exit(3, said="KeyError: 'a'", out_of_memory="", peak="") == "KeyError: 'a'"
    assert cause_of_exit(-31, said="", out_of_memory="", peak="") == "ended with signal SIGSYS and said nothing"


def pulse(
    rank: int, *, step: int = 5, phase: str = "start", sequence: int = -1, still_s: float = 0.0, **given: object
) -> Liveness:
    at = Position(step, phase, sequence=sequence)
    return Liveness(rank=rank, at=at, first_step=0, heard_s=100.0, progress_s=100.0 - still_s, **given)  # type: ignore[arg-type]


def names(*pulses: Liveness, **given: float) -> list[int]:
    return [p.rank for p in stalled(pulses, 100.0, after_s=10.0, **given)]


def test_the_one_furthest_behind_is_blamed() -> None:
    waits = {"still_s": 20.0, "phase": "exchange"}
    assert names(pulse(0, sequence=8, **waits), pulse(1, sequence=6, still_s=15.0, phase="compute")) == [1]
    assert names(pulse(0, **waits), pulse(1, still_s=15.0, phase="compute")) == [1], "among equals who does not wait"
    assert names(pulse(0, step=4, **waits), pulse(1, step=5, still_s=30.0, phase="save")) == [0]


def test_when_all_wait_for_each_other_all_are_named() -> None:
    assert names(*(pulse(rank, still_s=20.0, phase="exchange") for rank in range(3))) == [0, 1, 2]


def test_no_alarm() -> None:
    waits = {"still_s": 20.0, "phase": "exchange"}
    assert names(pulse(0, **waits), pulse(1, still_s=1.0, phase="compute")) == [], "it is slow, but it moves"
    assert names(pulse(0, **waits), pulse(1, still_s=15.0, longest_s=5.0, phase="compute"), patience=4.0) == []
    assert names(Liveness(rank=0, heard_s=0, progress_s=0), Liveness(rank=1, heard_s=0, progress_s=0)) == [], (
        "they compile"
    )
    assert names(pulse(0, still_s=20.0, finished=True)) == []
    assert names() == []


def test_a_pause_of_the_supervisor_is_nobodys_silence() -> None:
    later = pulse(0, still_s=20.0).later(15.0, 100.0)
    assert (later.progress_s, later.heard_s) == (95.0, 100.0)


def test_who_does_not_wait_is_blamed_by_those_who_do() -> None:
    waits = {"still_s": 20.0, "phase": "compute", "waits": True}
    assert names(pulse(0, sequence=6, **waits), pulse(1, sequence=8, still_s=15.0, phase="compute")) == [1], (
        "in a pipeline ranks send unequally much"
    )
    assert names(pulse(0, step=0, **waits), Liveness(rank=1, heard_s=0, progress_s=0)) == [1], (
        "before its first step too"
    )
    both = (pulse(1, step=5, still_s=15.0, phase="compute"), pulse(2, step=5, still_s=14.0, phase="compute"))
    assert names(pulse(0, **waits), *both) == [1, 2]
    assert names(pulse(0, **waits), both[0], pulse(2, still_s=1.0, phase="compute")) == [1], "one that moves is no bar"
    assert names(pulse(0, **(waits | {"still_s": 5.0})), both[0]) == [], "nobody has waited for long yet"


def test_a_slow_disk_is_no_hang_unless_somebody_waits_for_it() -> None:
    saves = [pulse(rank, still_s=60.0, phase="save") for rank in range(2)]
    assert names(*saves) == []
    assert names(pulse(0, still_s=60.0, phase="compute", waits=True), saves[1]) == [1]
    assert names(*(pulse(rank, still_s=700.0, phase="save") for rank in range(2))) == [0, 1]


def test_who_is_left_standing_once_others_have_given_up() -> None:
    gone = pulse(0, still_s=20.0, finished=True)
    others = (pulse(1, still_s=21.0), pulse(2, still_s=3.0), pulse(3, still_s=19.0), pulse(4, still_s=20.0, waits=True))
    assert [p.rank for p in left_standing([gone, *others], 100.0, after_s=1.0)] == [1, 3]
    assert left_standing([gone, others[1]], 100.0, after_s=5.0) == []


def test_what_all_ranks_find_out_together_is_nobodys_failure() -> None:
    cause = "WireMismatch: rank 2 differs from the other 2"
    found = find_root_cause([dated(at, rank, exit_code=3, cause=cause) for rank, at in enumerate((2.0, 1.0, 3.0))])
    rows = format_report(found, rundir=Path("runs/x")).splitlines()
    assert "| first failing rank  none alone: ranks 0, 1, 2 on a failed alike" in rows[1]
    assert not any("failed as well" in row for row in rows)


def test_the_place_in_the_users_code_stands_under_the_cause() -> None:
    found = find_root_cause([dated(1.0, 1, exit_code=3, cause="ValueError: no", place="net.py:12 in forward")])
    rows = [row.strip("| ") for row in format_report(found, rundir=Path("runs/x")).splitlines()]
    assert rows[rows.index("likely cause        ValueError: no") + 1] == "at net.py:12 in forward"


def cut_off(rundir: Path, *, step: int, moved_s: float, sealed: int | None = None) -> Supervisor:
    """Host 0 of two, which has not heard the other one for an hour, and whose own rank moved `moved_s` seconds ago."""
    now_s = time.monotonic()
    own = Liveness(rank=0, at=Position(step, "exchange"), first_step=0, heard_s=now_s, progress_s=now_s - moved_s)
    crew = SimpleNamespace(pulses=(own,), exit_codes=(), sealed=sealed, owns=lambda rank: False)
    line = SimpleNamespace(others={1}, heard_s={1: now_s - 3600.0}, send=lambda *said, **more: None)
    site = Site(rundir=rundir, host=0, hostnames=("a", "b"), say=print, tick=lambda: None)
    found = Supervisor(site, crew, line, loop=None, limits=Limits())  # type: ignore[arg-type]
    at = RankPosition(
        rank=1, pid=7, step=15, phase="agree", op="gather", sequence=9, first_step=0, still_s=0.0, longest_s=0.1,
        finished=False, waits=False, place="",
    )  # fmt: skip
    found._verdicts.hear(1, HostAlive(standings=(at,)))
    return found


def test_a_host_is_not_lost_while_ranks_that_wait_for_it_step(tmp_path: Path) -> None:
    """After a cut that healed, messages of a step are through before those of its supervisor."""
    assert cut_off(tmp_path, step=16, moved_s=1.0)._lost_hosts() == []
    assert [f.host for f in cut_off(tmp_path, step=16, moved_s=3600.0)._lost_hosts()] == [1]
    assert [f.host for f in cut_off(tmp_path, step=0, moved_s=1.0)._lost_hosts()] == [1]  # it loads its model


def test_a_lost_host_is_named_with_the_step_it_was_at(tmp_path: Path) -> None:
    supervisor = cut_off(tmp_path, step=16, moved_s=3600.0)
    (lost,) = supervisor._lost_hosts()
    own = dated(1.0, 0, hostname="a", what="host lost", cause="the supervisor on host a is gone")
    text = format_report(find_root_cause([Dated(failure=lost, at_s=0.0), own]), rundir=tmp_path)
    said = " ".join(text.replace("|", " ").split())
    assert "first failing rank every rank of host b" in said
    assert "stood at step 15, agree, last operation gather (number 9)" in said
    assert "failed as well every rank of host a (the supervisor on host a is gone)" in said


def test_ranks_that_save_because_a_host_was_lost_were_not_asked_to_stop(tmp_path: Path) -> None:
    """The run has failed, with a checkpoint. One that had ended before has not."""
    for sealed, before, code in ((INTERRUPTED, None, FAILED), (INTERRUPTED, INTERRUPTED, INTERRUPTED), (DONE, None, 0)):
        supervisor = cut_off(tmp_path, step=16, moved_s=3600.0, sealed=before)
        supervisor._note(supervisor._lost_hosts())
        supervisor._crew.sealed = sealed  # type: ignore[misc]
        end = supervisor._outcome()
        assert end.exit_code == code
        assert ("every rank of host b" in end.text) == (code == FAILED)


def test_a_host_whose_workers_are_not_there_yet_hears_that_another_has_failed(tmp_path: Path) -> None:
    """It waits no longer for what its workers are copied from, however long that takes to import."""
    failed = failure(1, host=1, hostname="b", cause="no such data", exit_code=3)
    heard = [[], [(1, RankFailed(failure=failed))], [(1, Done(exit_codes=(3,)))]]
    waited: list[bool] = []

    def start(jobs: object, *, imports: object, may_wait: Callable[[], bool]) -> None:
        while len(waited) < 50 and may_wait():
            waited.append(True)

    crew = SimpleNamespace(
        start=start, judge=lambda: ([], []), reap=lambda stop: [], pulses=(), is_over=True, exit_codes=(), sealed=None,
        forgive=lambda pause_s: None, owns=lambda rank: False, end=lambda: None, kill=lambda: None,
    )  # fmt: skip
    line = SimpleNamespace(
        received=lambda: heard.pop(0) if heard else [],
        send=lambda *said, **more: None,
        others={1},
        heard_s={1: math.inf},
    )
    site = Site(rundir=tmp_path, host=0, hostnames=("a", "b"), say=print, tick=lambda: None)
    loop = EventLoop()
    try:
        end = Supervisor(site, crew, line, loop=loop, limits=Limits()).run([])  # type: ignore[arg-type]
    finally:
        loop.close()
    assert len(waited) == 1
    assert end.exit_code == 3 and end.blame is not None and end.blame.first == failed
