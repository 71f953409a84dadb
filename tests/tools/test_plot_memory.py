"""plot_memory: what the picture says, that it is a picture, and one line for each fault."""

import pytest

from megatron_lite.memory.measure.timeline import Event, Timeline, write_timeline
from megatron_lite.tools import plot_memory
from tests.support.commands import fault_of

ERROR = "python -m megatron_lite.tools.plot_memory: error: "


@pytest.fixture
def good(tmp_path):
    path = str(tmp_path / "none.json")
    events = (Event(0, "forward", "embedding", "aten.embedding", (0, 0, 0, 7)),)
    write_timeline(Timeline(name="none", events=events), path)
    return path


def test_a_long_timeline_is_thinned_and_keeps_its_peak():
    events = [Event(number, "forward", "", "aten.mm", (number, 0, 0, 0)) for number in range(9999)]
    kept = plot_memory.thinned(events)
    assert len(kept) <= plot_memory.MAX_EVENTS and events[-1] in kept


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("missing.json", None, "missing.json"),
        ("bad.json", "{", "not a file of --memory-timeline"),
        ("schema.json", '{"format": "megatron_lite memory timeline", "version": 7}', "version"),
    ],
)
def test_a_file_that_will_not_do_is_one_line(good, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    words = [good, str(tmp_path / name), "--output", str(tmp_path / "m.svg")]
    error = fault_of(plot_memory.main, words)
    assert error.startswith(ERROR) and message in error and name in error
    assert not (tmp_path / "m.svg").exists()


@pytest.mark.parametrize("output", ["memory.gif", ".svg", "nowhere/m.svg"])
def test_an_output_that_cannot_be_written_is_one_line(good, output):
    reason = "nowhere" if "/" in output else "must end in .svg or .png"
    assert reason in fault_of(plot_memory.main, [good, "--output", output])
