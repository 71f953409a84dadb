"""The marks of a page: which of its blocks and figures a command makes.

A mark is an HTML comment, which a reader of the page does not see. A mark stands on the lines
before a fenced block or a table:

    <!-- output of: COMMAND     the block is what COMMAND prints (tests/docs/outputs.py)
         keep: FROM .. TO -->   only these lines; "..." stands for lines left out. May be repeated
    <!-- record: NAME -->       the block is a part of docs/records/NAME.txt: a run that takes long,
                                with its command in the first line
    <!-- made by: NAME -->      the block or the table is the text that a function of
                                tests/docs/figures.py returns
    <!-- run -->                commands or Python: tests/docs/test_commands.py runs them
    <!-- run: long -->          the same, in a test with the mark `long`
    <!-- not run: WHY -->       commands or Python that no test runs, such as one with placeholders
    <!-- not output: WHAT -->   a drawing, a formula or a form: nobody prints it

In a line of text a figure stands between <!--=NAME--> and <!--/-->.

The benchmarks that write into a page themselves have marks of their own (THEIR_BEGIN, THEIR_END).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.commands import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
]
KINDS = ("output of", "record", "made by", "run", "not run", "not output")
GENERATED = KINDS[:3]
COMMANDS = ("bash", "python")
INLINE = re.compile(r"<!--=([\w.-]+)-->(.*?)<!--/-->", re.DOTALL)
# Parts that a benchmark writes.
THEIR_BEGIN, THEIR_END = "<!-- tables of", "<!-- end"
_MARK = re.compile(rf"<!-- ({'|'.join(KINDS)})(?:: (.*?))? -->\s*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block or a marked table.

    kind: of the mark; "" without a mark. value: the first line of the mark. ranges: its other
    lines. language: of the fence; "table" for a table. start, stop: the numbers of the first line
    of the text and of the line after it.
    """

    page: Path
    kind: str = ""
    value: str = ""
    ranges: tuple[str, ...] = ()
    language: str
    start: int
    stop: int
    lines: tuple[str, ...] = field(repr=False)

    @property
    def text(self):
        """The text without the fences."""
        return "\n".join(self.lines)

    @property
    def name(self):
        """Where it stands, for messages and test names."""
        return f"{name_of(self.page)}:{self.start + 1}"


def text_of(page):
    """Returns the text of a page of docs/."""
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def name_of(path):
    """Returns the path from the repository's root, and the whole path of a file elsewhere."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def blocks(page, text=None):
    """Yields every fenced block of a page, and every table with a mark, in order."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    pending = None
    theirs = False  # inside of a part that a benchmark writes
    number = 0
    while number < len(lines):
        line = lines[number].strip()
        if line.startswith(THEIR_BEGIN):
            theirs = True
        elif line.startswith(THEIR_END):
            theirs = False
        fence = re.match(r"( *)(`{3,})(\w*)$", lines[number])
        if line.startswith("<!-- ") and not theirs:
            stop = number
            while "-->" not in lines[stop]:
                stop += 1
            found = _MARK.fullmatch("\n".join(lines[number : stop + 1]).strip() + " ")
            if found is not None:
                first, *others = (found[2] or "").splitlines() or [""]
                ranges = tuple(other.strip().removeprefix("keep: ") for other in others)
                pending = found[1], first.strip(), ranges
            number = stop
        elif fence is not None:
            stop = number + 1
            while lines[stop].strip() != fence[2]:
                stop += 1
            yield _block(page, pending, fence[3], number + 1, stop, lines)
            pending, number = None, stop
        elif line.startswith("|") and pending is not None:
            stop = number
            while stop < len(lines) and lines[stop].startswith("|"):
                stop += 1
            yield _block(page, pending, "table", number, stop, lines)
            pending, number = None, stop - 1
        elif line and pending is not None:
            raise ValueError(f"{page.name}:{number + 1}: a mark without a block or table after it")
        number += 1


def _block(page, mark, language, start, stop, lines):
    kind, value, ranges = mark or ("", "", ())
    indent = len(lines[start - 1]) - len(lines[start - 1].lstrip()) if language != "table" else 0
    return Block(
        page=page,
        kind=kind,
        value=value,
        ranges=ranges,
        language=language,
        start=start,
        stop=stop,
        lines=tuple(line[indent:] for line in lines[start:stop]),
    )


def with_texts(text, found):
    """Returns the page with these texts in place of those of its blocks."""
    lines = text.splitlines()
    for block, new in sorted(found, key=lambda pair: -pair[0].start):
        lines[block.start : block.stop] = new.splitlines()
    return "\n".join(lines) + "\n"
