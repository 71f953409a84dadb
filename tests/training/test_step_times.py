"""The time and the figures of a step are those of the step, and reading them waits for it alone."""

import json

import pytest

from tests.support.late_device import LateDevice
from tests.support.runs import run_to_end, tiny_run

# Of 20 iterations: an evaluation and a save inside, one log line for all figures at every step.


def _config(folder):
    return tiny_run(
        metrics=folder / "m",
        eval_interval=7,
        save=str(folder / "c"),
        save_interval=5,
        log_interval=1,
        log_style="megatron",
        log_params_norm=True,
        log_num_zeros_in_grad=True,
    )


def _figures(text):
    """The parts of the lines that are figures of a step."""
    words = ("loss", "norm", "zeros")
    return [
        [part for part in line.split("|") if any(word in part for word in words)]
        for line in text.splitlines()
        if "consumed samples" in line
    ]


def test_figures_read_one_step_late_are_those_of_their_own_step_and_wait_for_no_other(
    tmp_path, capsys
):
    """The late device gives zeros to who reads before the event, and notes each wait."""
    run_to_end(_config(tmp_path / "early"))
    early = _figures(capsys.readouterr().out)
    with pytest.MonkeyPatch.context() as patch:
        device = LateDevice(patch)
        run_to_end(_config(tmp_path / "late"))
    late = _figures(capsys.readouterr().out)
    assert late == early and len(early) == 20 and len(early[0]) == 5
    assert device.faults == []
    # Each step is waited for once, in order. Only before an evaluation, a save and the end is no
    # later step on its way.
    assert [steps for steps, _ in device.waited_for] == list(range(1, 21))
    drained = {5, 7, 10, 14, 15, 20}
    assert [launched - steps for steps, launched in device.waited_for] == [
        0 if number in drained else 1 for number in range(1, 21)
    ]
    # By the device's clock step N takes N ms, and an evaluation 1000 ms that belong to no step.
    assert [
        json.loads(row)["iteration_ms"]
        for row in (tmp_path / "late" / "m").read_text().splitlines()
    ] == pytest.approx(list(range(1, 21)))
