"""Captured steps, collectives of groups of one rank, and torch's sanitizer, on a device."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.parallel.state import GROUPS_OF_ONE
from megatron_lite.training.graphs import Capture
from tests.gpu.run import ROOT
from tests.gpu.test_gpu import check_resumed, finish, rows_of, tiny_run_on
from tests.support.saves import same, state_of

GRAPH = "full_iteration"
POLICIES = (None, "*:full", "0:core_attn+dropout; 1:layernorm+activation")


def test_captured_steps_have_the_bits_of_others(cuda, tmp_path):
    """With dropout, under three policies, in three precisions, and while the batch grows."""
    ramp = dict(global_batch_size=4, rampup_batch_size=(2, 2, 16))
    cases = [
        *((policy, dict(bf16=True)) for policy in POLICIES),
        ("*:full", dict(fp16=True, skip_update_on_spike=2.0)),
        ("*:full", ramp),
    ]
    for number, (policy, training) in enumerate(cases):
        ends = []
        for impl in ("none", GRAPH):
            folder = tmp_path / f"{number}-{impl}"
            config = tiny_run_on(
                cuda, folder, **training, deterministic_mode=True, cuda_graph_impl=impl
            )
            config = replace(config, recompute=RecomputeConfig(recompute_policy=policy))
            with mock.patch.object(
                Capture, "replay", autospec=True, side_effect=Capture.replay
            ) as replayed:
                trainer = finish(config, cuda)
            assert (replayed.call_count > 10) == (impl == GRAPH)
            ends.append((rows_of(folder), state_of(trainer.model, trainer.optimizer)))
        (one, first), (other, second) = ends
        assert one == other and same(first, second), (policy, training)


def test_a_resumed_captured_run_ends_as_an_unbroken_one(cuda, tmp_path):
    check_resumed(cuda, tmp_path, bf16=True, cuda_graph_impl=GRAPH)


def test_collectives_of_groups_of_one_change_nothing(device, tmp_path):
    """On a GPU over NCCL, also in a captured step: dtypes, contiguity, streams and waits."""
    graphs = ("none", GRAPH) if device.type == "cuda" else ("none",)
    shared = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    for impl in graphs:
        for data_parallel in (DataParallelConfig(), shared):
            name = f"{impl}-{data_parallel.use_distributed_optimizer}"
            options = dict(train_iters=6, deterministic_mode=True)
            alone = tiny_run_on(device, tmp_path / f"alone-{name}", **options)
            grouped = tiny_run_on(
                device, tmp_path / f"grouped-{name}", **options, cuda_graph_impl=impl
            )
            finish(alone, device)
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=f"file://{tmp_path}/{name}",
                rank=0,
                world_size=1,
            )
            try:
                with mock.patch.dict(os.environ, {GROUPS_OF_ONE: "1"}):
                    finish(replace(grouped, data_parallel=data_parallel), device)
            finally:
                dist.destroy_process_group()
            for one, other in zip(
                *(rows_of(tmp_path / f"{kind}-{name}") for kind in ("alone", "grouped")),
                strict=True,
            ):  # a sum of norms has another order under a distributed optimizer
                for key in ("lm_loss", "grad_norm"):
                    assert math.isclose(one[key], other[key], rel_tol=1e-4), (name, one, other)


@pytest.mark.parametrize(
    "more",
    [
        "--recompute-policy *:full@host",
        "--recompute-policy *:none@host",
        "--cuda-graph-impl full_iteration --recompute-policy *:full",
        "--torch-compile",
    ],
)
def test_the_sanitizer_reports_no_race(cuda, more):
    """Tensors in host memory, overlapped reductions and captured steps."""
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 99 "
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 "
        "--lr 1e-3 --mock-data --bf16 --eval-iters 0"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words.split(), *more.split()],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "CSAN detected" not in said, said
