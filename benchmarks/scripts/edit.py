"""Changes of a text that somebody else wrote: our lines, and where they go."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


class Lacking(Exception):
    """A snapshot lacks what a change is anchored at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of `file`, the script itself by default.

    `at`: where. `way`: "after" and "before" put `put` as lines beside the first line that begins with it (indented as
    that one is), "instead" puts it in the place of every occurrence.
    """

    at: str
    put: str
    way: str
    file: str = ""

    def of(self, text: str) -> str:
        """Raises Lacking."""
        if self.at not in text:
            raise Lacking(f"{self.file or 'the script'} has no {self.at!r}")
        if self.way == "instead":
            return text.replace(self.at, self.put)
        lines = text.split("\n")
        for index, line in enumerate(lines):
            if line.lstrip().startswith(self.at):
                space = line[: len(line) - len(line.lstrip())]
                new = [space + one for one in self.put.split("\n")]
                at = index + 1 if self.way == "after" else index
                return "\n".join([*lines[:at], *new, *lines[at:]])
        raise Lacking(f"{self.file or 'the script'} has no line that begins with {self.at!r}")


def after(at: str, *lines: str, file: str = "") -> Edit:
    return Edit(at=at, put="\n".join(lines), way="after", file=file)


def before(at: str, *lines: str, file: str = "") -> Edit:
    return Edit(at=at, put="\n".join(lines), way="before", file=file)


def instead(at: str, put: str, file: str = "") -> Edit:
    return Edit(at=at, put=put, way="instead", file=file)


def lines_changed(old: str, new: str) -> int:
    """Lines that are new, changed, or gone."""
    matcher = difflib.SequenceMatcher(a=old.split("\n"), b=new.split("\n"), autojunk=False)
    changes = [one for one in matcher.get_opcodes() if one[0] != "equal"]
    return sum(max(old_end - old_at, new_end - new_at) for _, old_at, old_end, new_at, new_end in changes)
