"""The command that makes a run again, from what its folder holds."""

from __future__ import annotations

import shlex

from gossamer.view.report.blocks import Block, Code, Paragraph
from gossamer.view.run_history import RunHistory


def reproduce(run: RunHistory) -> list[Block]:
    """Return the commands, and what they need besides; a sentence where the folder does not hold enough."""
    if not run.run.config_file.is_file():
        return [Paragraph("The folder has no run.yaml: the run cannot be repeated from it.", "note")]
    folder, inside = run.run.began_in()
    place = str(inside) if inside is not None else str(run.run.path.resolve())
    words = ["gossamer", "train", f"{place}/run.yaml"]
    if run.run.plan_file.is_file():
        words += ["--plan", f"{place}/plan.yaml"]
    lines = [f"cd {shlex.quote(str(folder))}"] if folder is not None else []
    blocks: list[Block] = []
    if not any(run.configuration.get(f"model.{kind}") for kind in ("hf", "gguf", "factory")):
        blocks.append(Paragraph("The model was built by a program: run that program instead.", "note"))
    else:
        blocks.append(Code("The same run again", "\n".join([*lines, shlex.join(words)])))
    if run.summary["starts"] > 1:
        blocks.append(Paragraph("It was resumed: run.yaml holds the settings of its last start.", "note"))
    if run.outcome in ("interrupted", "unfinished", "failed"):
        blocks.append(
            Code("Go on from its last checkpoint", "\n".join([*lines, shlex.join(["gossamer", "resume", place])]))
        )
    versions = run.start.versions if run.start is not None else {}
    if versions:
        said = ", ".join(f"{name} {version}" for name, version in versions.items())
        blocks.append(
            Paragraph(f"It ran with {said}; the fingerprint of its data is {run.fingerprint or 'not known'}.")
        )
    return blocks
