"""`gossamer teach`: it serves until it is told to end, says what it did, and ends as a command that is done."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from gossamer.cli import main
from gossamer.launch.port import listen
from gossamer.run.remote_teacher.link import Patience, TeacherLink
from gossamer.run.remote_teacher.messages import Terms
from gossamer.run.remote_teacher.teacher import RemoteTeacher
from gossamer.run.teacher import KnownWords
from gossamer.spec.errors import BadInput
from ports import free_port
from run.test_distillation import saved


def test_it_serves_until_it_is_told_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_TEACHER_TOKEN", "a secret")
    folder, port, answers = saved(tmp_path, 16), free_port(), list[object]()
    ids = torch.arange(18).view(2, 9) % 16
    asked = Terms(
        top_k=3,
        temperature=1.0,
        words=None,
        tile_tokens=8,
        precision="fp32",
        dims=3,
        isolates=False,
        wants_head=False,
    )

    def student() -> None:
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s and not answers:
            try:
                link = TeacherLink("127.0.0.1", port, token="a secret", patience=Patience())
            except BadInput:  # it does not listen yet
                time.sleep(0.05)
                continue
            rows = {"input_ids": ids, "labels": ids}
            remote = RemoteTeacher.of(link, asked, rows, torch.device("cpu"))
            answers.append(remote.answer(remote.ask(rows), torch.arange(17)[:16]))
            link.close()
        os.kill(os.getpid(), signal.SIGTERM)

    before, thread = signal.getsignal(signal.SIGTERM), threading.Thread(target=student)
    thread.start()
    code = main(["teach", folder, "--listen", f"127.0.0.1:{port}", "--json"])
    thread.join()
    out, err = capsys.readouterr()
    assert code == 0 and signal.getsignal(signal.SIGTERM) is before
    (answer,) = answers
    assert isinstance(answer, KnownWords) and answer.words.shape == (16, 3)
    done = json.loads(out.splitlines()[-1])
    assert (done["students"], done["questions"], done["tokens"]) == (1, 1, 16) and done["sent_bytes"] > 16 * 28
    assert f"at tcp://127.0.0.1:{port}; Ctrl-C ends it" in err and "student 1 at 127.0.0.1 left" in err


def test_what_cannot_be_served_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for given, said in (
            (("nowhere", f"127.0.0.1:{port}"), f"port {port} on 127.0.0.1 is in use"),
            (("nowhere", f"127.0.0.1:{free_port()}"), "TEACHER: wanted the folder of a run"),
            (("nowhere", "127.0.0.1"), "--listen: wanted HOST:PORT"),
            (("tcp://10.0.0.1:1", f"127.0.0.1:{free_port()}"), "as the model itself is needed here"),
        ):
            assert main(["teach", given[0], "--listen", given[1]]) == 2
            assert said in " ".join(capsys.readouterr().err.split())
