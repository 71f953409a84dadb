"""One flag for each field of the configuration, with Megatron-LM's name, type and default. No
setting is ignored silently: every config field is read somewhere outside the place that
defines and checks it."""

import ast
import dataclasses
import functools
import json
import typing
from pathlib import Path

import pytest

from arguments import build_parser, parse_args, supported_flags, topics
from megatron_lite.config import megatron_flags
from megatron_lite.config.megatron_flags import OTHER_WAYS
from megatron_lite.config.model import SWITCHED_ACTIVATIONS
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flag_of, flags_of, run_fields
from tests.support.commands import ROOT, parsed_line
from tests.support.pairs import in_one_test

FOLDER = Path(__file__).parent / "command_lines"
# Megatron-LM's own table of the flags that set a field, and ours: the spelling, Megatron's default
# (or ours, where Megatron fills it in later), a value that is not the default; then the flags that
# it needs, and the fields that change with it.
TABLE = json.loads((FOLDER / "flags.json").read_text())
MEGATRON, OURS = TABLE["megatron"], TABLE["ours"]
WITHOUT_FIELD = {
    "--help",
    "-h",
    "--dump-config",
    "--check-line",
    "--explain-recompute",
    "--dry-run-memory",
    "--dry-run-ranks",
    "--dry-run-world-size",
    "--dry-run-device",
    "--config-json",
    "--hf-config",
    "--model",
    "--preset",
    "--local-rank",
    "--local_rank",
}
BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 --vocab-size 99 --ffn-hidden-size 64 --kv-channels 4"
)


def actions():
    """Every supported flag with its argparse action."""
    parser = build_parser()
    return {name: parser._option_string_actions[name] for name in supported_flags(parser)}


@functools.cache
def parsed_fields(words):
    config = parsed_line(f"{BASE} {words}").config
    assert parse_args(flags_of(config)).config == config, "the way back is exact"
    text = config.to_json()
    again = RunConfig.from_json(text)
    assert again == config and again.to_json() == text
    return {
        field: value
        for topic in dataclasses.asdict(config).values()
        for field, value in topic.items()
    }


def test_each_field_has_one_flag_and_each_flag_one_field():
    names = [field.name for kind in topics().values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names)) and set(names) == run_fields().keys()
    others = {name for ways in OTHER_WAYS.values() for name in ways}
    set_by = {
        id(action): action.dest for name, action in actions().items() if name not in WITHOUT_FIELD
    }
    assert sorted(set_by.values()) == sorted([*names, *others])
    assert all(actions()[flag_of(name)].dest == name for name in names)
    tabled = [row[0] for row in (*MEGATRON, *OURS)]
    without_row = {flag for flag, action in actions().items() if action.dest in others}
    assert sorted(tabled) == sorted(actions().keys() - without_row - WITHOUT_FIELD)


@in_one_test("row", [*MEGATRON, *OURS])
def test_a_flag_changes_its_field_from_megatrons_default_and_nothing_else(row):
    plain = [tuple(one) if isinstance(one, list) else one for one in row]
    flag, default, value, needs, also = (*plain, "", "")[:5]
    field = actions()[flag].dest
    one = run_fields()[field]
    if one.is_required:
        assert default is None, "Megatron's None is an error there as well"
    else:
        assert one.default == default and type(one.default) is type(default)
    words = [] if isinstance(value, bool) else value if isinstance(value, tuple) else [value]
    if flag == "--window-size":
        words = ["3,0"]
    before = parsed_fields(needs)
    after = parsed_fields(f"{needs} {flag} {' '.join(map(str, words))}")
    assert {name for name in after if after[name] != before[name]} == {field, *also.split()}
    assert after[field] == value and type(after[field]) is type(value)


def test_a_flag_belongs_to_one_class_only():
    supported, refused = supported_flags(build_parser()), megatron_flags.REFUSED
    known = [*supported, *megatron_flags.NO_EFFECT, *megatron_flags.RENAMED, *refused]
    known += megatron_flags.BY_VALUE
    assert sorted(known) == sorted(set(known))
    assert megatron_flags.ONLY_VALUE.keys() <= refused.keys(), "the reason is in the table"
    by_value = [words for row in megatron_flags.BY_VALUE.values() for words in row.values()]
    words = " ".join([*megatron_flags.RENAMED.values(), *by_value]).split()
    legal = {*supported, *megatron_flags.ONLY_VALUE}
    assert {word for word in words if word.startswith("--")} <= legal
    assert megatron_releases().keys() <= {*known}, "every flag of every release is known"
    assert {row[0] for row in MEGATRON} <= megatron_releases().keys()
    assert not {row[0] for row in OURS} & megatron_releases().keys()


def test_a_flag_without_effect_takes_as_many_values_as_in_megatron():
    parser, theirs = build_parser(), megatron_releases()
    for flag in megatron_flags.NO_EFFECT.keys() & theirs.keys():
        nargs = parser._option_string_actions[flag].nargs
        assert (1 if nargs is None else nargs) == theirs[flag], flag


def megatron_releases():
    """Every spelling of a flag in the releases v1.0 to 2026-08, with the number of its values.

    The file has the first and the last release with the flag, too.
    """
    rows = json.loads((FOLDER / "megatron_flags.json").read_text())
    return {flag: nargs for flag, (nargs, *_) in rows.items()}


def test_suggestions_are_supported_flags_of_the_same_meaning():
    """A spelling can be near and the meaning far: --use-mpi is not --use-mup."""
    supported, no_effect = supported_flags(build_parser()), megatron_flags.NO_EFFECT
    for other, ours in megatron_flags.DATA["other programs"].items():
        assert other not in {*supported, *no_effect, *megatron_flags.REFUSED}
        assert megatron_flags.advice(other, supported) == f"did you mean {ours}?"
    # a tool without such a flag is not told of it
    assert "did you" not in megatron_flags.advice("--learning-rate", ["--gpus"])
    for name in ("--no-swiglu", "--adam-beta3", "--no-bias"):
        assert "did you" not in megatron_flags.advice(name, supported, no_effect)


FIELDS = [
    (topic, field.name)
    for topic, cls in typing.get_type_hints(RunConfig).items()
    for field in dataclasses.fields(cls)
]


def _attributes_read(path):
    """Attribute names in a file, without the rules of config classes."""
    names = set()

    def visit(node):
        if getattr(node, "name", "") in ("__post_init__", "check_rules"):
            return
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return names


@pytest.fixture(scope="module")
def read():
    return set().union(*(_attributes_read(path) for path in (ROOT / "megatron_lite").rglob("*.py")))


@in_one_test("topic, field", FIELDS)
def test_the_field_is_read(topic, field, read):
    # Activations, a tokenizer's files and the tokens of --fim-data are read by their names; the
    # others are second ways to say a granularity and a kind of graph, or allow other settings.
    others = ("recompute_activations", "cuda_graph_modules", "use_precision_aware_optimizer")
    others += ("tokenizer_model", "vocab_file", "merge_file")
    is_token = field.startswith("fim_") and field.endswith("_token")
    assert field in read or is_token or field in (*SWITCHED_ACTIVATIONS, *others)
