"""The package names nothing that Python 3.12 to 3.14 removed or warns of, and no default that
differs between versions. Only the versions at hand can run it; this reads the source."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    *sorted((ROOT / "megatron_lite").rglob("*.py")),
    *(ROOT / name for name in ("arguments.py", "pretrain_gpt.py", "setup.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
]
# 3.12 and 3.13 removed these modules, 3.12 to 3.14 these names.
MODULES = {
    "imp",
    "distutils",
    "asynchat",
    "asyncore",
    "smtpd",
    "cgi",
    "cgitb",
    "pipes",
    "telnetlib",
}
MODULES |= {"pkg_resources", "audioop", "crypt", "imghdr", "sndhdr", "uu", "xdrlib"}
NAMES = {
    *("ast.Str", "ast.Num", "ast.Bytes", "ast.NameConstant", "ast.Ellipsis"),
    *("pkgutil.find_loader", "pkgutil.get_loader", "importlib.abc.Traversable"),
    *("datetime.utcnow", "datetime.datetime.utcnow", "datetime.utcfromtimestamp"),
    *("locale.resetlocale", "typing.io", "typing.re", "unittest.makeSuite"),
    *("asyncio.get_event_loop", "inspect.getargspec", "logging.warn"),
}
# The start method of these is fork before 3.14 and forkserver from then on.
UNNAMED_METHOD = {"multiprocessing.Process", "multiprocessing.Pool", "multiprocessing.Queue"}
NEEDS_CONTEXT = {"ProcessPoolExecutor": 2, "get_context": 1}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def found(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in MODULES:
                yield node.module or ""
            names = {f"{node.module}.{one.name}" for one in node.names}
            yield from names & (NAMES | UNNAMED_METHOD)
        elif isinstance(node, ast.Attribute):
            if dotted(node) in NAMES | UNNAMED_METHOD:
                yield dotted(node)
        elif isinstance(node, ast.Call):
            least = NEEDS_CONTEXT.get(dotted(node.func).rpartition(".")[2], 0)
            named = any(one.arg in ("mp_context", "method") for one in node.keywords)
            if len(node.args) < least and not named:
                yield f"{dotted(node.func)} without a start method"
        elif isinstance(node, ast.Try):
            # a SyntaxWarning from 3.14 on (PEP 765)
            for last in node.finalbody:
                yield from (f"{name} in finally" for name in _leaving(last))


def _leaving(node: ast.AST, *, in_loop: bool = False) -> Iterator[str]:
    """The statements that leave a block: those of a loop in it end only that loop."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        return
    if isinstance(node, ast.Return) or (
        isinstance(node, (ast.Break, ast.Continue)) and not in_loop
    ):
        yield type(node).__name__.lower()
    for child in ast.iter_child_nodes(node):
        yield from _leaving(child, in_loop=in_loop or isinstance(node, (ast.For, ast.While)))


@pytest.mark.parametrize("part", range(8))
def test_nothing_is_used_that_newer_pythons_lack(part: int) -> None:
    used = {}
    for path in FILES[part::8]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as of an invalid escape
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        if names := sorted(set(found(tree))):
            used[str(path.relative_to(ROOT))] = names
    assert used == {}


@pytest.mark.parametrize(
    "text",
    [
        "import distutils.core",
        "from imp import reload",
        "ast.Str",
        "from datetime import datetime\ndatetime.utcnow()",
        "import multiprocessing\nmultiprocessing.Pool(2)",
        "from multiprocessing import Process",
        "ProcessPoolExecutor(2)",
        "get_context()",
        "def f():\n    try: pass\n    finally:\n        if 1: return",
        "for _ in ():\n    try: pass\n    finally:\n        break",
        "while True:\n    try: pass\n    finally:\n        if 1: continue",
    ],
)
def test_each_kind_is_found(text: str) -> None:
    assert len(list(found(ast.parse(text)))) == 1


def test_a_loop_within_finally_may_end() -> None:
    text = "try: pass\nfinally:\n    for _ in (): break"
    assert list(found(ast.parse(text))) == []
