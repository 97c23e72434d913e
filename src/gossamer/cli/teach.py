"""The command `gossamer teach`: a teacher for students on other hosts."""

from __future__ import annotations

from gossamer.api import verbs
from gossamer.cli.output import CommandResult, Json, write_note
from gossamer.spec.units import show_bytes


def teach(
    teacher: str,
    /,
    *,
    listen: str,
    token: str = "",
    clients: int = 64,
    stage: str = "",
    previous: str = "",
    cuts: str = "",
    json: Json = False,
) -> CommandResult:
    """Serve a teacher to runs on other hosts: `gossamer teach runs/LARGE --listen 10.0.0.1:29600`.

    Their configuration names it: train.loss {kl: {teacher: tcp://10.0.0.1:29600}}. It ends with Ctrl-C or SIGTERM.

    Parameters
    ----------
    teacher
        A run directory, a Hugging Face folder or a GGUF file, with the vocabulary of the students.
    listen
        HOST:PORT of this machine, on which it listens and on no other address.
    token
        The shared secret. Default: the variable GOSSAMER_TEACHER_TOKEN, which other users of this machine do not see;
        needed unless the address is of this machine alone. Students read it from that variable.
    clients
        Ranks that may ask at a time.
    stage
        I/N: only the I-th of N stages, with its weights alone, for a teacher that no machine holds. Students ask the
        last one.
    previous
        tcp://HOST:PORT of the stage before, for all stages but the first.
    cuts
        The first unit of every stage, as plan.cuts has them, separated by commas: 0,12,24. Default: equal bytes.
    """
    data = verbs.teach(
        teacher,
        listen,
        token=token,
        clients=clients,
        stage=stage,
        previous=previous,
        cuts=cuts,
        tell=lambda said: write_note(f"teach: {said}"),
    )
    told = (
        f"taught {data['students']} ranks: {data['questions']:,} micro-batches, {data['tokens']:,} tokens, "
        f"{show_bytes(data['sent_bytes'])} sent"
    )
    return CommandResult(data, told)
