"""Text of a run on its way into a page: whatever it holds, it is shown and not obeyed."""

from __future__ import annotations

import html
import re

_MARKS = re.compile(r"([\\`*_\[\]|~$])")
_AUTOLINK = re.compile(r"(?i)\b(https?|ftp|mailto)(:)|\b(www)(\.)|(@)")
_AT_START = re.compile(r"^([-+](?=\s|$)|-(?=-)|=(?==*\s*$)|#(?=#*(\s|$))|\d+(?=[.)](\s|$)))")


def shown(text: str) -> str:
    """Return text without control characters, among them those that turn the direction of writing."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.replace("\r\n", "\n"))


def html_text(text: str) -> str:
    """Return text for HTML, inside an element or a quoted attribute."""
    return html.escape(shown(text), quote=True)


def markdown_text(text: str) -> str:
    """Return text on one line of Markdown, for a paragraph, a list or a cell of a table, and without links."""
    plain = " ".join(shown(text).split())
    quoted = _MARKS.sub(r"\\\1", html.escape(plain, quote=False))
    quoted = _AUTOLINK.sub(lambda at: f"{at[1] or at[3] or ''}&#{ord(at[2] or at[4] or at[5])};", quoted)
    return _AT_START.sub(lambda at: f"&#{ord(at[1][0])};{at[1][1:]}", quoted)


def markdown_code(text: str) -> str:
    """Return text as a fenced block of Markdown; the fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown(text).rstrip()}\n{fence}"
