"""Counts by which a checkout can be compared with an earlier one.

python -m tests.counts                      this checkout
python -m tests.counts --root OTHER         another one
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FRAGMENT = re.compile(r"\s*(Of|That of|Those of|What|Where|As it|The same|For|Those)\b")
REGION_NAMES = {"core_attn", "layernorm", "mlp", "activation", "dropout", "pointwise"}
REGION_CONSTANTS = {"CORE_ATTENTION", "LAYERNORM", "MLP_REGION", "ACTIVATION", "DROPOUT"}
IGNORED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


LINEAR_CALLS = """
import sys
import torch
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.weight_gradient import accumulate_with_
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.tensor_parallel.rank_context import RankContext

cpu = torch.device("cpu")
context = RankContext(rng=RngStreams(cpu, seed=0), device=cpu, params_dtype=torch.float32)
layer = ColumnParallelLinear(8, 8, bias=True, init_std=1.0, context=context)
accumulate_with_(None, [(layer.weight, torch.zeros(8, 8))])
states, calls = torch.zeros(4, 2, 8, requires_grad=True), []
sys.setprofile(
    lambda frame, event, _: calls.append(1)
    if event == "call" and "megatron_lite" in frame.f_globals.get("__name__", "")
    else None
)
layer(states)
sys.setprofile(None)
print(len(calls))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    library = sorted((root / "megatron_lite").rglob("*.py")) + [
        root / "arguments.py",
        root / "pretrain_gpt.py",
    ]
    tests = sorted((root / "tests").rglob("*.py"))
    benchmarks = sorted((root / "benchmarks").rglob("*.py"))
    for name, value in (
        *counts_of_library(library),
        ("conditions on a CPU in model/ and tensor_parallel/", cpu_conditions(root)),
        ("own calls in one forward of a column-parallel linear layer", linear_calls(root)),
        *counts_of_tests(tests),
        ("tokens of tests", tokens_of(tests)),
        ("tokens of benchmarks", tokens_of(benchmarks)),
    ):
        print(f"{value:>9,.1f}  {name}" if isinstance(value, float) else f"{value:>9,}  {name}")
    return 0


def tokens_of(paths: list[Path]) -> int:
    """Returns the number of tokens without comments and line breaks."""
    return sum(
        token.type not in IGNORED
        for path in paths
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    )


def cpu_conditions(root: Path) -> int:
    """Returns how often the model and its sharded layers ask whether a tensor is on a CPU."""
    folders = (root / "megatron_lite" / name for name in ("model", "tensor_parallel"))
    return sum(path.read_text().count('"cpu"') for one in folders for path in one.glob("*.py"))


def linear_calls(root: Path) -> int:
    """Returns how many functions of the library one forward of a sharded linear layer calls."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return int(
        subprocess.run(
            [sys.executable, "-c", LINEAR_CALLS],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


def counts_of_library(paths: list[Path]) -> Iterator[tuple[str, float]]:
    """Yields the counts of the library and the entry scripts, with their names."""
    sources = {path: path.read_text() for path in paths}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    tokens = comments = 0
    for text in sources.values():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comments += token.type == tokenize.COMMENT
            tokens += token.type not in IGNORED
    docstrings = [
        text
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node)) is not None
    ]
    classes = Counter(
        node.name.lstrip("_")
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    files = Counter(path.name for path in paths if path.name != "__init__.py")
    lines = [line for text in sources.values() for line in text.splitlines()]
    yield "files of the library", len(paths)
    yield "lines", len(lines)
    yield "tokens of the library, without comments", tokens
    yield "comments for each 1,000 tokens", 1000 * comments / tokens
    yield "docstrings", len(docstrings)
    yield (
        "docstrings that begin with a fragment",
        sum(bool(FRAGMENT.match(text)) for text in docstrings),
    )
    yield "lines of more than 100 columns", sum(len(line) > 100 for line in lines)
    yield "class names that are used twice", sum(count > 1 for count in classes.values())
    yield "file names that are used twice", sum(count > 1 for count in files.values())
    yield "conditions on the name of one region", sum(map(region_conditions, trees.values()))


def region_conditions(tree: ast.Module) -> int:
    """Returns how many comparisons and conditions name one region."""
    return sum(
        any(_names_region(part) for part in ast.walk(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
    )


def _names_region(node: ast.AST) -> bool:
    return (isinstance(node, ast.Constant) and node.value in REGION_NAMES) or (
        isinstance(node, ast.Name) and node.id in REGION_CONSTANTS
    )


def counts_of_tests(paths: list[Path]) -> Iterator[tuple[str, float]]:
    """Yields the counts of the tests, with their names."""
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    yield (
        "test functions",
        sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in nodes),
    )
    yield (
        "reads of private attributes in tests",
        sum(
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and not (isinstance(node.value, ast.Name) and node.value.id == "self")
            for node in nodes
        ),
    )
    yield (
        "patched names in tests",
        sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("setattr", "setitem")
            for node in nodes
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
