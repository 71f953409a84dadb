"""Config files of somebody else: JSON, TOML and YAML as plain data, within bounds, and one line for
each fault."""

import random
from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.tools import translate_recompute
from megatron_lite.tools.translate_recompute import MAX_VALUES, read_config_file
from tests.support.commands import ended, fault_of
from tests.support.pairs import in_one_test

ERROR = "python -m megatron_lite.tools.translate_recompute: error: "

CONFIGS = sorted((Path(__file__).resolve().parent / "configs").iterdir())


def read(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_config_file(str(path))


def fault(path, text):
    with pytest.raises(InputError) as raised:
        read(path, text)
    message = str(raised.value)
    assert (
        message.startswith(f"{path}: ")
        and "\n" not in message
        and len(message) < 600 + len(str(path))
    )
    return message.removeprefix(f"{path}: ")


def laughs(levels):
    """Nine references to the line before in each line: 9 ** levels values, in a file of a few
    hundred bytes."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


@in_one_test("name", ["a.json", "a.yaml", "a.yml", "a.YAML", "a.conf", "a"])
def test_the_three_formats_give_the_same_values(tmp_path, name):
    wanted = {"a": {"b": [1, 2.5, True, None, "x"]}, "c": "${a.b}"}
    mark = "\ufeff"  # of a Windows editor
    text = '{"a": {"b": [1, 2.5, true, null, "x"]}, "c": "${a.b}"}'
    assert read(tmp_path / name, mark + text) == wanted
    if "json" not in name:
        assert (
            read(tmp_path / name, "# first\na:\n  b: [1, 2.5, true, null, x]\nc: ${a.b}\n")
            == wanted
        )
    if "." not in name:
        assert read(tmp_path / name, "# first\n[a]\nb = [1, 2.5, true, 'x']\n") == {
            "a": {"b": [1, 2.5, True, "x"]}
        }
        assert read(tmp_path / name, "\n a.b = 1 # last\n") == {"a": {"b": 1}}
    wanted["a"]["b"].remove(None)  # which TOML has not
    assert read(tmp_path / "a.toml", "c = '${a.b}'\n[a]\nb = [1, 2.5, true, 'x']") == wanted


@in_one_test(
    "name, text, message",
    [
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.py", b"x = 1", "a Python config is not run"),
        ("a.json", b"[" * 60 + b"]" * 60, "more than 50 levels deep"),
        ("a.json", b'{"a": 1, "a": 2}', "'a' is given twice"),
        ("a.json", b'{"a": "\xe9"}', "not a text in UTF-8 (byte 7)"),
        (
            "a.toml",
            b"x = {" + b".".join([b"a"] * 30_000) + b" = 1}",
            "line 1: more than 200 dots in one line",
        ),
        ("a.toml", b".".join([b"a"] * 100) + b" = 1", "more than 50 levels deep"),
        ("a.yaml", b"a: 1\na: 2", "the key 'a' stands twice"),
        ("a.yaml", b"- " * 60 + b"x", "more than 50 levels deep"),
        ("a.yaml", b"a: &a [*a]", "more than 50 levels deep"),
        ("a.yaml", b"a: !!python/object/apply:os.getcwd []", "not YAML"),
        ("a.yaml", b"a: 1\n---\nb: 2", "not YAML"),
        ("a.yaml", b"a: " + b"9" * 5000, "not YAML"),
        ("a.yaml", b"a: 2024-13-45", "not YAML"),
        (
            "a.yaml",
            b"a: [" + b"x, " * 30_000 + b"x]",
            f"more than {MAX_VALUES} values, aliases included",
        ),
        ("a", b"{'a': [1", "not JSON"),
    ],
)
def test_a_file_that_will_not_do_is_one_line(tmp_path, name, text, message):
    assert message in fault(tmp_path / name, text)


def test_aliases_count_as_often_as_they_are_used(tmp_path):
    assert len(read(tmp_path / "a.yaml", laughs(4))["a3"]) == 9
    for levels in (6, 12, 40):
        assert f"more than {MAX_VALUES} values, aliases included" in fault(
            tmp_path / "a.yaml", laughs(levels)
        )
    merged = ["a0: &a0 {x: 1}"]
    merged += [
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, 12)
    ]
    assert "aliases included" in fault(tmp_path / "a.yaml", "\n".join(merged))


def test_a_merge_brings_in_what_the_mapping_has_not(tmp_path):
    assert read(tmp_path / "a.yaml", "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\nc: {<<: *a}\n") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 3, "y": 2},
        "c": {"x": 1, "y": 2},
    }


@in_one_test("path", CONFIGS)
def test_a_file_that_is_cut_off_is_translated_or_one_line(path, tmp_path):
    """Cut at 12 places, and with 12 single bytes changed: never a traceback, never an empty
    answer."""
    content, draw, file = path.read_bytes(), random.Random(path.name), tmp_path / path.name
    places = [draw.randrange(len(content)) for _ in range(24)]
    versions = [content[:place] for place in places[:12]]
    versions += [
        content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]
        for place in places[12:]
    ]
    for version in versions:
        file.write_bytes(version)
        status, out, _ = ended(translate_recompute.main, [str(file)])
        if status:
            assert fault_of(translate_recompute.main, [str(file)]).startswith(ERROR), version
        else:
            assert out.startswith("--") and out.count("\n") == 1, version
