"""Sizes that no machine of this run can hold are one message with both numbers, before the first
tensor is made."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.units import size
from megatron_lite.memory.predict.states import parameter_count, rank_states
from megatron_lite.memory.predict.step_peak import step_peak
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training import build_trainer as build
from megatron_lite.training import out_of_memory as capacity
from megatron_lite.training.out_of_memory import memory_bytes
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.programs import program
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [(["max"], 3 << 30), (["1048576"], 1 << 20), ([str(1 << 62)], 3 << 30), ([], 3 << 30)],
)
def test_the_limit_of_the_control_group_counts_where_it_is_lower(
    tmp_path, monkeypatch, limits, expected
):
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {2 << 20} kB\nMemFree: 1 kB\nSwapTotal: {1 << 20} kB\n"
    )
    for limit in limits:
        (tmp_path / "memory.max").write_text(limit + "\n")
    monkeypatch.setattr(capacity, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(capacity, "CGROUP_LIMITS", [tmp_path / "memory.max"])
    assert memory_bytes(CPU) == expected


@pytest.mark.parametrize(
    "flags", [["--hidden-size", "1000000"], ["--num-layers", "4000", "--hidden-size", "16384"]]
)
def test_sizes_beyond_memory_end_the_program_with_status_2_and_one_line(tmp_path, flags):
    """Before --save is taken, and however many layers there are to list."""
    arguments = [
        *SMALL_RUN,
        *MOCK,
        "--tensor-model-parallel-size",
        "2",
        "--save",
        str(tmp_path / "save"),
        *flags,
    ]
    with program(arguments, ranks=2) as run:
        assert run.wait() == [2, 2], run.everything()
        (line,) = run.messages()
        assert "error: the model does not fit: " in line and "for the 2 ranks there" in line
        assert "Traceback" not in run.everything()
    assert not (tmp_path / "save").exists()


def _start(config, memory, monkeypatch):
    monkeypatch.setattr(capacity, "memory_bytes", lambda device: memory)
    monkeypatch.setattr(capacity, "least_bytes", lambda *_: 0)  # the states alone fit
    with parallel_state(config.parallel, seed=1) as parallel:
        build.build_trainer(config, parallel)


@pytest.mark.parametrize(
    "training", [dict(micro_batch_size=64, global_batch_size=64), dict(micro_batch_size=4)]
)
def test_a_predicted_peak_beyond_the_memory_is_refused_without_a_flag(training, monkeypatch):
    """Whatever holds it. The margin is half of each estimate: a run that fits always starts."""
    config = tiny_run(**training, learning_rate=0.001)
    peak = step_peak(config, 0, device="cpu", dp_cp_size=1, num_microbatches=1)
    for memory in (peak.num_bytes, None):
        _start(config, memory, monkeypatch)
    with pytest.raises(InputError) as fault:
        _start(config, peak.num_bytes // 2, monkeypatch)
    for text in (size(peak.num_bytes), size(peak.num_bytes // 2), peak.moment):
        assert text in str(fault.value)
    assert "--allow-predicted-out-of-memory starts the run all the same" in str(fault.value)
    allowed = replace(config.training, allow_predicted_out_of_memory=True)
    _start(replace(config, training=allowed), peak.num_bytes // 2, monkeypatch)


def test_the_peaks_of_the_ranks_of_one_host_are_added():
    def work(rank, world_size, memory):
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(InputError) as fault:
            _start(config, memory, monkeypatch)
        return str(fault.value)

    config = tiny_run(micro_batch_size=2, learning_rate=0.001)
    peak = step_peak(config, 0, device="cpu", dp_cp_size=2, num_microbatches=1)
    for text in run_ranks(work, 2, peak.num_bytes * 5 // 4):
        assert "the run does not fit. A step of this rank needs" in text
        assert "for the 2 ranks there" in text


def test_optimizer_states_beyond_the_memory_of_the_host_are_refused_before_the_start(monkeypatch):
    """Those of all ranks of a host together; the device has room."""
    run = tiny_run(learning_rate=0.001, optimizer_cpu_offload=True)
    with parallel_state(run.parallel, seed=1) as parallel:
        needed = rank_states(run, 0, dp_cp_size=1, dp_cp_rank=0).on_host
        # main weights and two moments, and two buffers of the largest parameter each way
        assert needed > 3 * 4 * parameter_count(run.model, run.tokenizer.rows(1))
        texts = [f"a {needed}", f"a {needed}", f"b {needed}"]
        monkeypatch.setattr(capacity, "gather_texts", lambda text, parallel: texts)
        monkeypatch.setattr(capacity.socket, "gethostname", lambda: "a")
        for memory, fits in ((2 * needed, True), (2 * needed - 1, False)):
            monkeypatch.setattr(capacity, "memory_bytes", lambda device, memory=memory: memory)
            if fits:
                capacity._check_host(run, parallel, "a")
            else:
                message = (
                    r"--optimizer-cpu-offload puts .* --optimizer-offload-fraction \(got 1.0\)"
                )
                with pytest.raises(InputError, match=message):
                    capacity._check_host(run, parallel, "a")
