"""No setting is ignored silently: every config field is read somewhere outside the place that
defines and checks it."""

import ast
import dataclasses
import typing
from pathlib import Path

import pytest

from megatron_lite.config.model import SWITCHED_ACTIVATIONS
from megatron_lite.config.run import RunConfig
from tests.support.pairs import in_one_test

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_lite"
FIELDS = [
    (topic, field.name)
    for topic, cls in typing.get_type_hints(RunConfig).items()
    for field in dataclasses.fields(cls)
]


def _attributes_read(path):
    """Attribute names in a file, without the rules in __post_init__ of config classes."""
    names = set()

    def visit(node):
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            return
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return names


@pytest.fixture(scope="module")
def read():
    return set().union(*(_attributes_read(path) for path in PACKAGE.rglob("*.py")))


@in_one_test("topic, field", FIELDS)
def test_the_field_is_read(topic, field, read):
    # Activations are read through the table of their names; the others are second ways to say a
    # granularity and a kind of graph, or allow other settings.
    others = ("recompute_activations", "cuda_graph_modules", "use_precision_aware_optimizer")
    assert field in read or field in (*SWITCHED_ACTIVATIONS, *others)
