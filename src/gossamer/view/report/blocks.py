"""The blocks of a report. Each writes itself as HTML and as Markdown; all text in them is plain, and escaped here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.view.report.escaping import html_text, markdown_code, markdown_text


class Block(ABC):
    """A part of a report."""

    @abstractmethod
    def html(self) -> str:
        """Return the block as HTML."""

    @abstractmethod
    def markdown(self) -> str:
        """Return the block as Markdown, without empty lines around it."""


@dataclass(frozen=True, slots=True)
class Paragraph(Block):
    """A paragraph; `kind` is "" for plain text, "note" for a remark, "bad" for what went wrong."""

    text: str
    kind: str = ""

    def html(self) -> str:
        role = f' class="{self.kind}"' if self.kind else ""
        return f"<p{role}>{html_text(self.text)}</p>"

    def markdown(self) -> str:
        return f"> {markdown_text(self.text)}" if self.kind else markdown_text(self.text)


@dataclass(frozen=True, slots=True)
class Tiles(Block):
    """The few figures that a reader looks for first: pairs (name, value)."""

    pairs: Sequence[tuple[str, str]]

    def html(self) -> str:
        inner = "".join(
            f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd></div>" for name, value in self.pairs
        )
        return f'<dl class="tiles">{inner}</dl>'

    def markdown(self) -> str:
        return "\n".join(f"- {markdown_text(name)}: **{markdown_text(value)}**" for name, value in self.pairs)


@dataclass(frozen=True, slots=True)
class Facts(Block):
    """Pairs (name, value), one below the other; pairs without a value are left out."""

    pairs: Sequence[tuple[str, str]]

    def html(self) -> str:
        inner = "".join(f"<dt>{html_text(name)}</dt><dd>{html_text(value)}</dd>" for name, value in self._known())
        return f'<dl class="facts">{inner}</dl>'

    def markdown(self) -> str:
        return "\n".join(f"- {markdown_text(name)}: {markdown_text(value)}" for name, value in self._known())

    def _known(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.pairs if value]


@dataclass(frozen=True, slots=True)
class Table(Block):
    """Rows under a head. `name` tells a screen reader what is in it; columns from `figures_from` on are numbers."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures_from: int = 99

    def html(self) -> str:
        head = "".join(f'<th scope="col"{self._side(at)}>{html_text(cell)}</th>' for at, cell in enumerate(self.head))
        rows = "".join(
            "<tr>" + "".join(f"<td{self._side(at)}>{html_text(cell)}</td>" for at, cell in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f'<div class="scroll" tabindex="0" role="region" aria-label="{html_text(self.name)}">{table}</div>'

    def markdown(self) -> str:
        ruled = [("--:" if self._side(at) else "---") for at in range(len(self.head))]
        lines = [[markdown_text(cell) for cell in self.head], ruled]
        lines += [[markdown_text(cell) for cell in row] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _side(self, column: int) -> str:
        return ' class="figure"' if column >= self.figures_from else ""


@dataclass(frozen=True, slots=True)
class Code(Block):
    """Text as it is: a command, a file, the words of a model."""

    name: str
    text: str

    def html(self) -> str:
        label = html_text(self.name)
        return (
            f'<pre tabindex="0" role="region" aria-label="{label}"><code>{html_text(self.text.rstrip())}</code></pre>'
        )

    def markdown(self) -> str:
        return markdown_code(self.text)


@dataclass(frozen=True, slots=True)
class Folded(Block):
    """Blocks behind their title, which a click or the Enter key opens."""

    title: str
    inner: Sequence[Block]

    def html(self) -> str:
        inner = "\n".join(block.html() for block in self.inner)
        return f"<details><summary>{html_text(self.title)}</summary>\n{inner}\n</details>"

    def markdown(self) -> str:
        inner = "\n\n".join(block.markdown() for block in self.inner)
        return f"<details><summary>{html_text(self.title)}</summary>\n\n{inner}\n\n</details>"


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with blocks under it. `name` is the place that links lead to."""

    name: str
    title: str
    blocks: Sequence[Block]

    def html(self) -> str:
        """Return the section as HTML."""
        inner = "\n".join(block.html() for block in self.blocks)
        heading = f'<h2 id="{self.name}-title">{html_text(self.title)}</h2>'
        return f'<section id="{self.name}" aria-labelledby="{self.name}-title">\n{heading}\n{inner}\n</section>'

    def markdown(self) -> str:
        """Return the section as Markdown."""
        return "\n\n".join([f"## {markdown_text(self.title)}", *(block.markdown() for block in self.blocks)])
