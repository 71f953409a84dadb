"""A run that stops and is resumed leaves the same bytes as one that does not.

A run that continues on another kind of processor is told that its low bits can change.
"""

import json

import pytest
import torch

from megatron_lite.checkpointing.metadata import Metadata
from megatron_lite.checkpointing.step_files import METADATA, step_directory
from megatron_lite.training import loop
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run
from tests.training.test_experts import MODEL as EXPERTS

LAST, STOP = 6, 3
MUON = dict(bf16=True, optimizer="muon", muon_nesterov=True)
ROUNDED = dict(
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="fp16",
    main_grads_dtype="bf16",
    main_params_dtype="fp16",
    stochastic_rounding=True,
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    optimizer_offload_fraction=0.3,
)
EMPTY = "Ettt||L"
INSTANCES = dict(num_distributed_optimizer_instances=2)
SEQUENCE = dict(tp_size=2, sequence_parallel=True)
UNTIED = dict(untie_embeddings_and_output_weights=True)
SCALE = dict(fp16=True, initial_loss_scale=2.0**20, loss_scale_window=1.0, hysteresis=1)
# by name: the ranks, and the settings of tiny_run
CASES = {
    "alone": (1, dict(skip_update_on_spike=9.0)),
    "bf16, tp2 sp dp2": (4, dict(SEQUENCE, bf16=True)),
    "experts, tp2 sp": (2, dict(SEQUENCE, **EXPERTS)),
    "zero1": (2, dict(data_parallel=LAYOUTS["zero1, overlap"], bf16=True)),
    "fsdp2": (2, dict(UNTIED, data_parallel=LAYOUTS["fsdp2, memory-efficient"])),
    "states on the host": (
        1,
        dict(fp16=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
    ),
    "rounded states, some on the host": (
        2,
        dict(ROUNDED, data_parallel=LAYOUTS["zero1, overlap"], bf16=True),
    ),
    "zero1, 2 instances": (4, dict(INSTANCES, data_parallel=LAYOUTS["zero1, overlap"], bf16=True)),
    "fsdp2, 2 instances": (4, dict(INSTANCES, data_parallel=LAYOUTS["fsdp2"], bf16=True)),
    "empty stages": (
        3,  # rank 1 has no parameters
        dict(num_layers=3, pipeline_model_parallel_size=3, pipeline_model_parallel_layout=EMPTY),
    ),
    "muon": (1, MUON),
    "the loss scale goes up and down": (2, dict(SCALE, tp_size=2)),
    "experts, pp2": (2, dict(EXPERTS, pipeline_model_parallel_size=2)),
    "muon, tp2 sp dp2": (4, dict(SEQUENCE, **MUON, data_parallel=LAYOUTS["zero1"])),
    "shuffled samples": (1, dict(dataloader_type="cyclic")),
}


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("name", CASES)
def test_three_iterations_a_restart_and_three_more_equal_six(tmp_path, name):
    """Weights, moments, master weights, random-number streams (dropout is on) and every logged
    loss, over an evaluation. The kept bytes are as predicted."""
    ranks, settings = CASES[name]

    def run(folder, stop, **checkpoint):
        run_to_end(
            tiny_run(
                train_iters=LAST,
                eval_interval=STOP,
                exit_interval=stop,
                metrics=tmp_path / f"{folder}.jsonl",
                save=str(tmp_path / folder),
                **settings,
                **checkpoint,
            )
        )

    def work(rank, world_size):
        run("whole", None, save_interval=STOP)
        run("parts", STOP)
        run("parts", None, load=str(tmp_path / "parts"))

    run_ranks(work, ranks) if ranks > 1 else work(0, 1)
    whole = rows(tmp_path / "whole.jsonl")
    assert rows(tmp_path / "parts.jsonl") == whole and len(whole) == LAST
    for row in whole:
        assert row["activation_bytes_predicted"] == row["activation_bytes_measured"]
    for step in (STOP, LAST):
        expected, found = (step_bytes(tmp_path / folder, step) for folder in ("whole", "parts"))
        assert expected == found != {}
        metadata = [
            json.loads((tmp_path / folder / f"iter_{step:07d}" / METADATA).read_text())
            for folder in ("whole", "parts")
        ]
        assert metadata[0] == metadata[1]
        if name == "alone":
            assert metadata[0]["mean_loss"]["count"] == step
    if "loss scale" in name:
        resumed = whole[STOP:]
        assert any(row["skipped"] for row in resumed)
        assert len({row["loss_scale"] for row in resumed}) > 1


ELSEWHERE = "GenuineIntel CPU with AVX2, 1 thread a rank, torch 2.13.0"


def test_a_run_on_the_same_processor_is_told_nothing_and_one_on_another_both(
    tmp_path, capsys, monkeypatch
):
    def told(iterations, **load):
        run_to_end(tiny_run(train_iters=iterations, eval_iters=0, save=str(tmp_path), **load))
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if "the checkpoint was computed on" in line]

    load = dict(load=str(tmp_path))
    assert told(2) == []
    kept = Metadata.read(step_directory(tmp_path, 2)).computed_on
    assert kept == loop.described(torch.device("cpu"))
    assert told(3, **load) == []
    monkeypatch.setattr(loop, "described", lambda *_: ELSEWHERE)
    (line,) = told(4, **load)
    assert kept in line and ELSEWHERE in line
    assert Metadata.read(step_directory(tmp_path, 4)).computed_on == ELSEWHERE
