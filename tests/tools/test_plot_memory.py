"""plot_memory: what the picture says, that it is a picture, and one line for each fault."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from megatron_lite.memory.measure.timeline import Event, Predicted, Timeline, write_timeline
from megatron_lite.tools import plot_memory

ERROR = "python -m megatron_lite.tools.plot_memory: error: "

MIB = 2**20


def timeline(name: str, peak_bytes: int, *, module: str = "decoder.layers.1.mlp") -> Timeline:
    kept = peak_bytes // 2
    rest = peak_bytes - kept - kept // 2 - kept // 4
    return Timeline(
        name=name,
        events=(
            Event(0, "forward", "embedding", "aten.embedding", (0, 0, 0, kept // 2)),
            Event(40, "forward", "decoder.layers.0.mlp", "aten.mm", (kept, 0, 0, kept // 3)),
            Event(70, "replay", "decoder.layers.1.mlp", "aten.gelu", (kept, kept // 2, 0, 0)),
            Event(90, "backward", module, "aten.gelu_backward", (kept, kept // 2, kept // 4, rest)),
            Event(160, "backward", "embedding", "", (0, 0, kept, 0)),
        ),
    )


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / "none.json"), str(tmp_path / "full.json")]
    write_timeline(timeline("none", 50 * MIB), paths[0])
    write_timeline(timeline("full $x_1$ uniform", 20 * MIB), paths[1])
    return paths


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


def test_the_picture_names_policies_peaks_and_where_they_are(
    two: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "memory.svg"
    assert plot_memory.main([*two, "--output", str(output)]) == 0
    shown = texts(output)
    for text in (
        "none",
        "full $x_1$ uniform",
        "live bytes [MiB]",
        "operators run",
        "phase",
        "layer",
        "peak 50.00 MiB",
        "peak 20.00 MiB (−60%)",
        "in backward, aten.gelu_backward",
        "decoder.layers.1.mlp",
        "activations kept from forward",
        "activations rebuilt by a replay",
        "parameter gradients",
        "temporary",
        "phase: forward",
        "phase: replay",
        "phase: backward",
    ):
        assert text in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "full.json",
        "memory.svg",
        "none.json",
    ]


def test_panels_share_the_scale_of_bytes_and_of_operators() -> None:
    short = Timeline(name="b", events=timeline("b", 3 * MIB).events[:3])
    figure = plot_memory.draw([timeline("a", 50 * MIB), short])
    first, second = figure.axes[0], figure.axes[1]
    assert first.get_ylim() == second.get_ylim() == (0, 65.0)
    assert first.get_xlim() == second.get_xlim() == pytest.approx((0, 160))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_no_text_sticks_out_of_the_picture(count: int) -> None:
    one = timeline("a", 50 * MIB)
    one = replace(one, predicted=(Predicted("forward", 0, 1, MIB),))
    with matplotlib.rc_context(plot_memory.STYLE):
        figure = plot_memory.draw([one] * count)
        figure.draw_without_rendering()
    (legend,) = figure.legends
    for text in (figure._suptitle, *legend.get_texts()):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_the_stacks_reach_the_peak_and_the_areas_are_the_categories() -> None:
    axes = plot_memory.draw([timeline("a", 48 * MIB)]).axes[0]
    tops = [
        max(path.vertices[:, 1].max() for path in area.get_paths()) for area in axes.collections
    ]
    assert tops == [24, 36, 42, 48]  # activation, + rebuilt, + gradient, + temporary


@pytest.mark.parametrize(
    ("peak_bytes", "unit"),
    [(0, "KiB"), (2**20 - 1, "KiB"), (5 * MIB, "MiB"), (2**30, "GiB"), (2**62, "GiB")],
)
def test_the_unit_fits_the_largest_peak(peak_bytes: int, unit: str) -> None:
    assert (
        plot_memory.draw([timeline("a", peak_bytes)]).axes[0].get_ylabel() == f"live bytes [{unit}]"
    )


def test_the_same_timelines_make_the_same_file(two: list[str], tmp_path: Path) -> None:
    pictures = [tmp_path / "1.svg", tmp_path / "2.svg"]
    for picture in pictures:
        plot_memory.plot_memory(two, str(picture))
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


@pytest.mark.parametrize("count", [1, 5])
def test_a_png_is_drawn_of_one_policy_and_of_more_than_a_row(
    two: list[str], tmp_path: Path, count: int
) -> None:
    output = tmp_path / "memory.png"
    assert plot_memory.main([*[two[0]] * count, "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_names_of_any_length_and_of_odd_characters_are_drawn(tmp_path: Path) -> None:
    write_timeline(
        timeline("a\n\x00$" * 500, 5000, module="m." * 500 + "<&>"), str(tmp_path / "odd.json")
    )
    assert (
        plot_memory.main([str(tmp_path / "odd.json"), "--output", str(tmp_path / "odd.svg")]) == 0
    )
    assert max(map(len, texts(tmp_path / "odd.svg"))) < 60


def test_a_long_timeline_is_thinned_and_keeps_its_peak() -> None:
    events = tuple(
        Event(number, "forward", "", "aten.mm", (number % 97, 0, 0, 1000 if number == 5432 else 0))
        for number in range(10_000)
    )
    kept = plot_memory.thinned(events)
    assert len(kept) <= plot_memory.MAX_EVENTS and events[5432] in kept


def fault(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a run that must end with status 2."""
    assert plot_memory.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(ERROR) and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.json", None, "missing.json"),
        ("bad.json", "{", "not JSON"),
        ("schema.json", '{"format": "megatron_lite memory timeline", "version": 7}', "version"),
        ("empty.json", "", "not JSON"),
    ],
)
def test_a_file_that_will_not_do_is_one_line(
    two: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str | None,
    message: str,
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    error = fault([two[0], str(tmp_path / name), "--output", str(tmp_path / "m.svg")], capsys)
    assert message in error and name in error
    assert not (tmp_path / "m.svg").exists()


def test_a_huge_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**33)
    assert "longer than" in fault(
        [str(tmp_path / "huge.json"), "--output", str(tmp_path / "m.svg")], capsys
    )


@pytest.mark.parametrize("output", ["memory.gif", "memory", "svg", ".svg", "memory.svg.txt"])
def test_another_ending_is_one_line(
    two: list[str], capsys: pytest.CaptureFixture[str], output: str
) -> None:
    assert "--output must end in .svg or .png" in fault([*two, "--output", output], capsys)


def test_a_folder_that_is_not_there_is_one_line(
    two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere" in fault([*two, "--output", str(tmp_path / "nowhere" / "m.svg")], capsys)


def test_without_matplotlib_the_extra_is_named(
    two: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = fault([*two, "--output", str(tmp_path / "m.svg")], capsys)
    assert "needs the package matplotlib" in text and "pip install -e '.[plot]'" in text


def test_it_runs_as_a_command(two: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_lite.tools.plot_memory",
        *two,
        "--output",
        str(tmp_path / "m.svg"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
