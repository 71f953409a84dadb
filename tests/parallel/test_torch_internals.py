"""Private names of torch: one module has them all, and a torch that lacks one gives a clear error.

The scan reads the library's sources. It knows a private name of torch by its underscore.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.parallel import torch_internals
from megatron_lite.training.run_notices import RunNotices
from tests.support.runs import tiny_run

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = ROOT / "megatron_lite/parallel/torch_internals.py"
LIBRARY = sorted((ROOT / "megatron_lite").rglob("*.py"))
# Private attributes of other libraries' objects: namedtuples, the standard library.
NOT_OF_TORCH = {
    *("_replace", "_asdict", "_fields"),
    *("_exit", "_getframe", "_run_exitfuncs"),
    *("_option_string_actions", "_group_actions"),
    "_from_config",  # of transformers
}
# The registries of every torch.nn.Module, which subclasses rely on.
OF_MODULES = {"_parameters", "_buffers", "_modules"}
# Names that stand for torch.ops or one of its namespaces.
OPERATORS = ("torch.ops.", "aten.", "argparse.", "pickle.")  # and other packages


def private_names(source: str) -> Iterator[str]:
    """Yields the private names of torch that `source` reaches for."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if _is_private(node.attr) and not text.startswith(OPERATORS):
                of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                of_super = ast.unparse(node.value) == "super()"
                if (
                    not of_itself
                    and not of_super
                    and node.attr not in NOT_OF_TORCH | OF_MODULES | own
                ):
                    yield text
            continue
        else:
            continue
        for name in names:
            if name.startswith("torch.") and any(map(_is_private, name.split("."))):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_module_reaches_for_a_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in LIBRARY
        if path != INTERNALS
        for name in private_names(path.read_text())
    }
    assert found == set()


def test_this_torch_has_every_name() -> None:
    for one in vars(torch_internals).values():
        if isinstance(one, partial):
            assert not isinstance(one(), torch_internals.Missing)
    assert torch_internals.MISSING == []


def test_a_use_of_a_missing_name_names_the_version_the_name_and_the_range(monkeypatch) -> None:
    monkeypatch.setattr(torch_internals, "MISSING", [])
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    taken = torch_internals.private("torch._C._current_graph_task_id")
    expected = (
        rf"torch {torch.__version__} has no torch\._C\._current_graph_task_id, which is needed "
        rf"here: install torch>={torch_internals.OLDEST},<{torch_internals.FIRST_UNTRIED},"
    ).replace("+", r"\+")

    class Derived(taken):  # type: ignore[valid-type, misc]
        """A class that is defined on import, and made when the feature is used."""

    for use in (lambda: taken(), lambda: taken.anything, Derived):
        with pytest.raises(InputError, match=expected):
            use()
    assert not isinstance(taken, Derived) and not isinstance(3, (str, taken))
    notices = RunNotices.of(tiny_run(), device="cpu", world_size=1).in_log
    assert [text for text in notices if "lacks torch._C._current_graph_task_id" in text]
