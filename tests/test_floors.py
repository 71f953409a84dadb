"""The layout is a rule: a module imports only from strictly lower floors or from its own folder,
and some constructs are banned.

Reads the sources; imports nothing of the project. Imports inside functions and under `if
TYPE_CHECKING` count too.
"""

import ast
import re
import sys

from tests.support.commands import ROOT, python
from tests.support.pairs import in_one_test

PACKAGE = "megatron_lite"
FLOORS = {
    "config": 0,
    "description": 1,
    "parallel": 1,
    "data": 1,
    "tensor_parallel": 2,
    "context_parallel": 2,
    "recompute": 2,
    "pipeline": 2,
    "optim": 2,
    "model": 3,
    "memory": 3,
    "checkpointing": 4,
    "supervision": 4,
    "plan": 4,
    "training": 5,
    "pages": 5,
    "convert": 5,
    "fit": 5,
    "tools": 6,
    "cli": 6,
}
ROOF = ("arguments", "pretrain_gpt")
# The package's own modules that stand above all folders: the command and the public functions.
ROOF_OF_PACKAGE = ("__main__", "api")
# The part that puts policies on models of other libraries, and the tokens that it and a fit may
# load. Those that only `@host` and `@split` load come on top.
OTHER_MODELS = "megatron_lite.recompute.apply"
MOST_TOKENS_FOR_OTHER_MODELS, MOST_TOKENS_FOR_A_FIT = 30_000, 49_600
STANDARD_LIBRARY_ONLY = ("config", "description")
WITHOUT_TORCH = ("data", "memory.predict", "memory.explain", "plan", "pages")
# What fits any model knows nothing of this project's own model, engine and flags.
BY_FIT = (
    *("config.units", "fit", "memory.measure"),
    *("parallel.torch_internals", "parallel.weights", "recompute"),
)
NOT_BY_PREDICTIONS = ("megatron_lite.memory.measure", "megatron_lite.memory.explain")
BANNED = {
    "pickle.load": r"\bpickle\.loads?\b|from pickle import",
    "eval(": r"(?<![\w.])eval\(",
    "weights_only=False": r"weights_only\s*=\s*False",
    "allow_pickle=True": r"allow_pickle\s*=\s*True",
}
LIBRARY = sorted((ROOT / PACKAGE).rglob("*.py"))
IN_FOLDERS = [path for path in LIBRARY if path.parent.name != PACKAGE]
SOURCES = [*LIBRARY, *(path for name in ROOF if (path := ROOT / f"{name}.py").exists())]


def imports_of(source, module):
    """Dotted names of all modules, and of all names taken from modules, that `source` imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def faults_of(source, module):
    """What in `source` breaks a rule of the layout, where it is the text of `module`
    ("megatron_lite.model.layer")."""
    folder = module.split(".")[1]
    faults = []
    for name in sorted(imports_of(source, module)):
        first, *rest = name.split(".")
        target = rest[0] if rest else ""
        if first in ROOF:
            faults.append(f"{name}: the roof")
        elif first != PACKAGE:
            # typing_extensions: for mypy alone
            known = {*sys.stdlib_module_names, "typing_extensions"}
            if folder in STANDARD_LIBRARY_ONLY and first not in known:
                faults.append(f"{name}: {folder}/ is standard library only")
            if first == "torch" and any(
                f"{module}.".startswith(f"{PACKAGE}.{part}.") for part in WITHOUT_TORCH
            ):
                faults.append(f"{name}: {module} does not import torch")
        elif module.startswith(f"{PACKAGE}.memory.predict") and name.startswith(NOT_BY_PREDICTIONS):
            faults.append(f"{name}: predictions know neither of measuring nor of explaining")
        elif folder == "fit" and not name.startswith(tuple(f"{PACKAGE}.{one}" for one in BY_FIT)):
            faults.append(f"{name}: only {', '.join(BY_FIT)} are for fit/")
        elif target != folder and FLOORS.get(target, 99) >= FLOORS[folder]:
            faults.append(
                f"{name}: floor {FLOORS.get(target, 'unknown')} from floor {FLOORS[folder]}"
            )
    return faults


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def reached_from(module):
    """Returns the project's modules that `module` imports, themselves or through others, late
    imports among them."""
    names, waiting, found = {module_name(path) for path in LIBRARY}, [module], set()
    while waiting:
        name = waiting.pop()
        if name in names - found:
            found.add(name)
            imported = imports_of((ROOT / f"{name.replace('.', '/')}.py").read_text(), name)
            waiting += [*imported, *(each.rpartition(".")[0] for each in imported)]
    return found


def test_policies_for_models_of_other_libraries_stand_alone():
    """They know nothing of our GPT, of its engine for units and regions, of its flags and plans."""
    found = reached_from(OTHER_MODELS)
    assert {name for name in found if name.startswith("megatron_lite.config.")} <= {
        f"megatron_lite.config.{name}"
        for name in ("checks", "operators", "policy", "regions", "row_blocks")
    }
    assert {name.split(".")[1] for name in found} == {"config", "parallel", "recompute"}
    assert not found & {
        f"megatron_lite.recompute.{name}"
        for name in ("checkpoint", "layer_runner", "region_runner", "schedule")
    }


def test_importing_them_loads_torch_and_nothing_else():
    program = """
import sys, torch
def show():
    ours = {name: one.__file__ for name, one in sys.modules.items() if "megatron_lite." in name}
    print(*ours)
    from tests.counts import tokens_of
    print(tokens_of([pathlib.Path(file) for file in ours.values() if "__init__" not in file]))
before = {name.partition(".")[0] for name in sys.modules}
from megatron_lite import api
assert [name for name in sys.modules if name.startswith("megatron_lite.")] == ["megatron_lite.api"]
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
api.apply_policy_(model, layers_fqn="", policy="*:full")
model(torch.ones(1, 2)).sum().backward()
print(*({name.partition(".")[0] for name in sys.modules} - before))
import pathlib
show()
api.remove_policy_(model)
api.fit_memory_  # the first call loads what measures
assert [name for name in sys.modules if name.startswith("megatron_lite.fit.")] == [
    "megatron_lite.fit.memory_fit"]
step = lambda: model(torch.ones(1, 2)).sum().backward()
api.fit_memory_(model, "1GiB", step=step, layers_fqn="", optimizer=torch.optim.AdamW)
show()
"""
    roots, ours, tokens, _, of_fit = python(program).stdout.splitlines()
    own = {"jinja2", "matplotlib", "numpy", "rich", "safetensors", "transformers", "yaml"}
    assert not own & set(roots.split())  # torch itself loads sympy
    assert int(tokens) <= MOST_TOKENS_FOR_OTHER_MODELS and int(of_fit) <= MOST_TOKENS_FOR_A_FIT
    assert {"megatron_lite.api", *ours.split()} - reached_from(OTHER_MODELS) <= {
        "megatron_lite.api",
        *(f"megatron_lite.{folder}" for folder in FLOORS),
    }


def test_every_folder_has_a_floor():
    folders = {path.relative_to(ROOT / PACKAGE).parts[0] for path in IN_FOLDERS}
    assert folders and folders <= set(FLOORS)
    above = {path.stem for path in LIBRARY if path.parent.name == PACKAGE}
    assert above <= {"__init__", *ROOF_OF_PACKAGE}


@in_one_test("path", [path for path in IN_FOLDERS if path.name != "__init__.py"])
def test_a_module_imports_only_from_lower_floors_or_its_own_folder(path):
    assert faults_of(path.read_text(), module_name(path)) == []


@in_one_test("path", [path for path in LIBRARY if path.name == "__init__.py"])
def test_an_init_file_is_a_docstring_and_nothing_else(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    rest = [ast.unparse(node) for node in tree.body[1:]]
    if path.parent.name == PACKAGE:
        # and a program's Ctrl-C, which must work before any other import
        assert rest[0] == "import sys" and rest[1].startswith("__version__ = ")
        assert len(rest) == 4 and rest[2].startswith("_is_looked_for = sys.argv[:1] == ['-m']")
        assert rest[3].startswith("if _is_looked_for or ")
    else:
        assert rest == []


@in_one_test("path", SOURCES)
def test_no_source_unpickles_evaluates_text_or_keeps_globals(path):
    source = path.read_text()
    assert [name for name, pattern in BANNED.items() if re.search(pattern, source)] == []
    assert not [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Global)]
