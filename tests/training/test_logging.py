"""Figures of the iteration line that are computed from the run's facts.

What a run looks like: short lines, settings, the summary and the log file.
"""

import re
import shlex

import pytest
import torch

from arguments import parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.plan.hardware import MACHINES
from megatron_lite.training.iteration_line import (
    Interval,
    IterationRecord,
    RunFacts,
    iteration_line,
    peak_rate,
)
from megatron_lite.training.summary import short_settings
from tests.support.changes import with_fields, with_settings
from tests.support.gpus import show_gpus
from tests.support.rank_faults import first_step_fails
from tests.support.runs import run_on_ranks, run_to_end, tiny_run

FACTS = RunFacts(
    num_iterations=9,
    num_samples=36,
    batch_size=4,
    tokens=64,
    world_size=2,
    flops=(30_000_000, 41_000_000),
    peak_flops=1e9,
    device=torch.device("cpu"),
)


def record(**changes):
    values = dict(
        iteration=3,
        consumed_samples=12,
        global_batch_size=4,
        lm_loss=1.5,
        grad_norm=0.5,
        learning_rate=0.01,
        loss_scale=1.0,
        iteration_ms=50.0,
        tokens_per_second=1280.0,
        skipped=0,
        nan=0,
    )
    return IterationRecord(**{**values, **changes})


def test_the_flops_of_a_line_are_those_of_the_attended_documents():
    facts = FACTS._replace(beside_attention=(10_000_000, 11_000_000))
    whole, quarter = (Interval([record(attended=share)], facts) for share in (None, 0.25))
    assert quarter.teraflops == pytest.approx(whole.teraflops * 15 / 30)
    of = quarter.utilization["HFU"] / whole.utilization["HFU"]
    assert of == pytest.approx((11 + 30 / 4) / 41)


def own_fields(records):
    """The fields after Megatron's last one, up to the peak memory."""
    line = iteration_line(Interval(records, FACTS), FACTS, throughput=False)
    return re.search(r"nan iterations: +\d+ \| (.*) \| peak GiB", line)[1].split(" | ")


def test_utilization_is_flops_over_time_ranks_and_peak():
    """30 and 41 MFLOP in 50 ms by 2 ranks of 1 GFLOP/s: 0.3 and 0.41."""
    assert own_fields([record()]) == ["tokens/s/GPU: 640.0", "MFU: 30.0%", "HFU: 41.0%"]


def test_speeds_are_those_of_the_samples_that_the_iterations_had():
    """1 and 3 samples in 50 ms each: half of the work, and so of the tokens and FLOPs, of two full
    batches of 4."""
    ramp = [record(global_batch_size=1), record(global_batch_size=3, consumed_samples=16)]
    assert own_fields(ramp) == ["tokens/s/GPU: 320.0", "MFU: 15.0%", "HFU: 20.5%"]
    facts = with_fields(FACTS, num_samples=16 + 4 * 36_000, flops=(30 * 10**9, 0))
    line = iteration_line(Interval(ramp, facts), facts, throughput=True)
    assert "throughput per GPU (TFLOP/s/GPU): 0.1500" in line  # 30 GFLOP in 100 ms by 2 ranks
    assert "global batch size:     3 |" in line
    assert "ETA: 1:00:00" in line  # 36,000 full batches of 100 ms


def test_the_hardware_flops_of_a_run_follow_partial_checkpointing_and_the_ramp(tmp_path):
    """A layer runs 13312 - 4096 multiply-adds per token again, a tenth of the 3 x 30720 of a step;
    see below for the figures.

    Each of 2 ranks has one of 2 layers. Of 1, 1, 2 and 3 micro-batches rank 0 recomputes 0, 0, 1
    and 1, and rank 1 none.
    """
    config = tiny_run(
        attention_backend="unfused",
        global_batch_size=3,
        rampup_batch_size=(1, 1, 3),
        train_iters=4,
        eval_iters=0,
        recompute_policy="*:full",
        num_microbatches_with_partial_activation_checkpoints=1,
        pipeline_model_parallel_size=2,
        peak_tflops_per_gpu=1e-9,
        log_interval=1,
        log_style="megatron",
        log_file=str(tmp_path / "log"),
    )
    run_on_ranks(config, 2)
    found = re.findall(r"MFU: ([\d.]+)% \| HFU: ([\d.]+)%", (tmp_path / "log").read_text())
    assert [float(hardware) / float(model) for model, hardware in found] == pytest.approx(
        [1, 1, 1 + 0.1 / 2, 1 + 0.1 / 3]
    )


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_peak_that_nobody_measured_is_not_known(tmp_path, monkeypatch):
    """Neither an unknown card nor a CPU has one, whatever machine the times are predicted for. A
    file of tools/calibrate.py has one, for a device of its kind."""
    show_gpus(monkeypatch, 1, name="Card X")
    for machine in (None, "cpu", "h100-80gb"):
        config = LoggingConfig(machine=machine)
        for device, name in ((CPU, "this CPU"), (GPU, "Card X")):
            rate = peak_rate(config, device, bf16=True)
            assert (
                rate.flops is None and f"MFU is left out: the peak FLOP/s of {name}" in rate.line()
            )
    measured = tmp_path / "here.json"
    measured.write_text((MACHINES / "cpu.json").read_text())
    config = LoggingConfig(machine=str(measured))
    assert peak_rate(config, CPU, bf16=True) == (2e11, f"--machine {measured}")
    assert peak_rate(config, CPU, bf16=False).flops == 1e11
    assert peak_rate(config, GPU, bf16=True).flops is None


def test_the_settings_at_the_start_are_those_that_differ():
    config = tiny_run(ffn_hidden_size=100, add_bias_linear=False, recompute_policy="*:full")
    lines = short_settings(config)[1:]
    words = [word for line in lines for word in shlex.split(line[line.index("--") :])]
    assert parse_args(words).config == config
    assert "--seed" not in words
    paths = tuple(f"/a/very/long/path/to/dataset-{number}_text_document" for number in range(200))
    config = with_settings(config, mock_data=False, data_path=paths)
    assert len("\n".join(short_settings(config))) < 1000


def test_the_log_file_is_appended_to_and_has_the_error_that_ends_a_run(
    tmp_path, monkeypatch, capsys
):
    """A name in it can neither begin a line nor rule a terminal."""
    path = tmp_path / "\x1b[1m\n\u202e" / "run.log"
    config = tiny_run(train_iters=4, log_file=str(path))
    run_to_end(config)
    first_step_fails(monkeypatch, InputError("the\nsky\n  falls"))
    with pytest.raises(InputError, match="sky"):
        run_to_end(config)
    text = path.read_text()
    assert text.count(" after iteration 0\n") == text.count("end of arguments") == 2
    assert text.endswith("error: the\\nsky\n  falls\n")
    out = capsys.readouterr().out
    assert "sky" not in out and out.count("\\x1b[1m\\n\\u202e/run.log\n") == 1
    assert "\x1b" not in text + out + "".join(short_settings(config))
