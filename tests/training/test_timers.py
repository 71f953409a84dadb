"""The timers of --timing-log-level: Megatron's text, and no clock at level 0."""

import re
import time

import pytest
import torch

from megatron_lite.training.profiler import LEVELS, Timers, times_text
from tests.support.ranks import run_ranks
from tests.support.runs import events_in, rows, run_to_end, tiny_run

TIMES = {"forward-backward": [1.5, 12.25], "optimizer": [0.0, 3.0], "batch-generator": [7.0, 6.0]}


@pytest.mark.parametrize("option", ["minmax", "max", "all"])
@pytest.mark.filterwarnings("ignore")  # its imports warn of packages that it can do without
def test_the_text_is_that_of_megatron_core(option, monkeypatch):
    oracle = pytest.importorskip("megatron.core.timers").Timers(2, option)
    seconds = torch.tensor(list(TIMES.values())).T / 1000.0
    monkeypatch.setattr(oracle, "_get_elapsed_time_all_ranks", lambda *_: seconds)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert times_text(TIMES, option) == oracle.get_all_timers_string(list(TIMES), 1.0)


def test_the_last_iteration_is_logged_with_the_times_since_the_line_before(tmp_path, monkeypatch):
    counts, path = [], tmp_path / "rows"
    monkeypatch.setattr(Timers, "report", lambda timers, number: counts.append(number) or {})
    config = tiny_run(
        metrics=path, train_iters=5, log_interval=3, timing_log_level=1, log_params_norm=True
    )
    run_to_end(config)
    logged = [row["iteration"] for row in rows(path) if row.get("params_norm")]
    assert logged == [3, 5] and counts == [3, 2]


@pytest.mark.runs
@pytest.mark.parametrize("pp_size", [1, 2])
def test_each_level_shows_its_timers_and_changes_no_figure(tmp_path, capfd, pp_size):
    for level in (0, 1, 2):
        config = tiny_run(
            metrics=tmp_path / str(level),
            train_iters=5,
            eval_iters=0,
            timing_log_level=level,
            timing_log_option="minmax",
            tensorboard_dir=str(tmp_path / f"tb{level}"),
            log_timers_to_tensorboard=True,
            pipeline_model_parallel_size=pp_size,
        )

        def work(rank, world_size, config=config):
            """Returns whether this rank reads a clock."""
            read = []
            with pytest.MonkeyPatch.context() as patch:
                now = lambda _: read.append(time.perf_counter()) or read[-1]  # noqa: E731
                patch.setattr(Timers, "_now", now)
                run_to_end(config)
            return bool(read)

        assert run_ranks(work, 2) == [level > 0] * 2
        names = re.findall(
            r"^    (\S+) \.+: \(\d+\.\d\d, \d+\.\d\d\)$", capfd.readouterr().out, re.M
        )
        absent = {"params-all-gather"}
        assert names == [
            name for name, least in LEVELS.items() if least <= level and name not in absent
        ]
        assert rows(tmp_path / str(level)) == rows(tmp_path / "0")
    events = events_in(tmp_path / "tb2")
    assert [event.step for event in events.Scalars("forward-backward-time")] == [5]
    # the parts of the longest rank are within the whole
    whole = events.Scalars("forward-backward-time")[0].value
    assert 0.0 < events.Scalars("forward-compute-time")[0].value < whole
