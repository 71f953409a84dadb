"""Makes the figures and the blocks of output on the pages again: `python -m tests.docs.generate`

    --check         compares them with the pages, prints what differs, and exits with status 1
    --write         writes them into the pages
    --record NAME   runs a command that takes minutes, and writes docs/records/NAME.txt; "memory"
                    writes the timelines of the first page's picture

tests/docs/marks.py explains the marks in the pages.
"""

import argparse
import difflib
import sys
from pathlib import Path

from tests.docs import figures, outputs
from tests.docs.marks import GENERATED, INLINE, PAGES, blocks, name_of, with_texts


def made(block):
    """Returns the text that a generated block should have."""
    if block.kind == "output of":
        return outputs.kept(outputs.output(block.value), block.ranges)
    if block.kind == "record":
        return outputs.kept(outputs.record(block.value), block.ranges)
    return figures.TEXTS[block.value]().rstrip("\n")


def is_quick(block):
    """Whether the text is made without a command."""
    return block.kind in ("record", "made by")


def remade(page, choose=lambda block: True):
    """Returns the page with its generated blocks and figures made again.

    choose: which of the blocks are made again.
    """
    text = page.read_text(encoding="utf-8")
    chosen = [one for one in blocks(page) if one.kind in GENERATED and choose(one)]
    text = with_texts(text, [(block, made(block)) for block in chosen])
    return INLINE.sub(
        lambda found: f"<!--={found[1]}-->{figures.FIGURES[found[1]]()}<!--/-->", text
    )


def difference(page, choose=lambda block: True):
    """Returns what differs between a page and what the commands make; "" if nothing does."""
    name = name_of(page)
    return "\n".join(
        difflib.unified_diff(
            page.read_text(encoding="utf-8").splitlines(),
            remade(page, choose).splitlines(),
            name,
            f"{name}, made again",
            lineterm="",
        )
    )


def main(argv=None):
    """Returns the exit status: 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.generate", description=__doc__.splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="compare, and exit with 1 if stale")
    what.add_argument("--write", action="store_true", help="write into the pages")
    what.add_argument("--record", choices=[*outputs.COMMANDS, "memory"], help="run a long command")
    parser.add_argument("pages", nargs="*", type=Path, help="some pages only")
    args = parser.parse_args(argv)
    for page in args.pages:
        if not page.is_file():
            parser.error(f"{page}: no such page")
    if args.record:
        outputs.write_record(args.record)
        return 0
    stale = 0
    for page in [path.resolve() for path in args.pages] or PAGES:
        found = difference(page)
        stale += bool(found)
        if found and args.write:
            page.write_text(remade(page), encoding="utf-8")
            print(f"written: {name_of(page)}")
        elif found:
            print(found)
    for path, make in figures.FILES.items():
        text = make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale += 1
            if args.write:
                path.write_text(text, encoding="utf-8")
            print(f"{'written' if args.write else 'stale'}: {name_of(path)}")
    return int(bool(stale) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
