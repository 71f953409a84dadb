"""Private names of torch: one module has them all, and a torch that lacks one gives a clear error.

The scan reads the library's sources. It knows a private name of torch by its underscore.
"""

import ast
from functools import partial

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.notices import notices
from megatron_lite.parallel import torch_internals
from megatron_lite.training.summary import here
from tests.support.commands import ROOT
from tests.support.runs import tiny_run

INTERNALS = ROOT / "megatron_lite/parallel/torch_internals.py"
LIBRARY = sorted((ROOT / "megatron_lite").rglob("*.py"))
# Private names of other libraries, and the registries of every torch.nn.Module.
ELSEWHERE = {
    *("_replace", "_asdict", "_fields", "_exit", "_getframe", "_current_frames", "_run_exitfuncs"),
    *("_option_string_actions", "_group_actions"),
    "_from_config",  # of transformers
    *("_parameters", "_buffers", "_modules"),
}
# operators of torch, and other packages
OTHERS = ("torch.ops", "aten", "argparse", "pickle", "threading")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_no_other_module_reaches_for_a_private_name_of_torch():
    """A private name is torch's where the library gives it to nothing of its own."""
    own, used = set(ELSEWHERE), set()
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                holder = ast.unparse(node.value)
                is_own = holder in ("self", "cls", "super()")
                if not holder.startswith(OTHERS):
                    own.add(node.attr) if is_own else used.add((path, node.attr))
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
                names = (str(node.module), *(alias.name for alias in node.names))
                used |= {(path, part) for name in names for part in name.split(".")}
    found = {(path, name) for path, name in used if is_private(name) and name not in own}
    assert {path for path, _ in found} <= {INTERNALS}, found


def test_this_torch_has_every_name():
    for one in vars(torch_internals).values():
        if isinstance(one, partial):
            assert not isinstance(one(), torch_internals.Missing)
    assert torch_internals.MISSING == []


def test_a_use_of_a_missing_name_names_the_version_the_name_and_the_range(monkeypatch):
    monkeypatch.setattr(torch_internals, "MISSING", [])
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    taken = torch_internals.private("torch._C._current_graph_task_id")
    expected = (
        rf"torch {torch.__version__} has no torch\._C\._current_graph_task_id, which is needed "
        rf"here: install torch>={torch_internals.OLDEST},<{torch_internals.FIRST_UNTRIED},"
    ).replace("+", r"\+")

    class Derived(taken):
        """A class that is defined on import, and made when the feature is used."""

    for use in (lambda: taken(), lambda: taken.anything, Derived):
        with pytest.raises(InputError, match=expected):
            use()
    assert not isinstance(taken, Derived) and not isinstance(3, (str, taken))
    said = notices(tiny_run(), "log", here=here("fp32"))
    assert any("lacks torch._C._current_graph_task_id" in text for text in said)
