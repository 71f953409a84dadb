"""A timeline's file: what is written comes back, and what is not a timeline is refused in one
line."""

import json

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.memory.measure.timeline import (
    MAX_FILE_BYTES,
    Event,
    Timeline,
    read_timeline,
    write_timeline,
)

TIMELINE = Timeline(
    name="full, Einheit 2 – größer",
    events=(
        Event(0, "forward", "", "aten.embedding", (0, 0, 0, 12)),
        Event(3, "forward", "layers.0.mlp", "aten.mm", (40, 0, 0, 2**40)),
        Event(4, "replay", "layers.0", "aten.mm", (40, 2**40, 0, 0)),
        Event(9, "backward", "layers.0.mlp", "", (0, 0, 7, 0)),
    ),
)


def document(tmp_path):
    write_timeline(TIMELINE, str(tmp_path / "good.json"))
    return json.loads((tmp_path / "good.json").read_text())


def test_what_is_written_is_read_back(tmp_path):
    write_timeline(TIMELINE, str(tmp_path / "timeline.json"))
    assert read_timeline(str(tmp_path / "timeline.json")) == TIMELINE
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


@pytest.mark.parametrize(
    "changes, fault",
    [
        (dict(version=2), "'version'"),
        (dict(events=[]), "'events'"),
        (dict(predicted=[[0, 0, 1]]), "row 0 of 'predicted'"),
        (dict(events=[[0, 0, 0, 0, 1, 1, 1, 2**63]]), "row 0 of"),
        (dict(events=[[4, 0, 0, 0, 1, 1, 1, 1], [4, 0, 0, 0, 1, 1, 1, 1]]), "out of order"),
    ],
)
def test_a_wrong_schema_is_refused_by_the_part_that_is_wrong(tmp_path, changes, fault):
    (tmp_path / "bad.json").write_text(json.dumps({**document(tmp_path), **changes}))
    with pytest.raises(
        InputError, match=rf"bad\.json: not a file of --memory-timeline, version 1: .*{fault}"
    ):
        read_timeline(str(tmp_path / "bad.json"))


def test_a_huge_file_is_refused_unread(tmp_path):
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(100 * MAX_FILE_BYTES)  # a hole: takes no space
    with pytest.raises(InputError, match="longer than 33554432 bytes"):
        read_timeline(str(tmp_path / "huge.json"))
