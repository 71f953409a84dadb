"""--cuda-graph-impl: a captured step gives the bits of one without (tests/support/graphs.py)."""

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.training.step import StageRunner
from tests.support.graphs import built
from tests.support.ranks import run_ranks
from tests.support.runs import rows, step_bytes, tiny_run

GRAPH = dict(cuda_graph_impl="full_iteration")
FULL = dict(recompute_policy="*:full")
PARTS = dict(recompute_policy="0:core_attn+dropout+layernorm; 1:full")
PADDED = dict(
    recompute_policy="*:moe",
    num_experts=4,
    add_bias_linear=False,
    moe_aux_loss_coeff=0.1,
    moe_expert_capacity_factor=0.7,
    moe_pad_expert_input_to_capacity=True,
)
# by name: ranks, and settings of tiny_run
RUNS = {
    "none": (1, {}),
    "full": (1, FULL),
    "fp16-parts": (1, dict(PARTS, fp16=True, skip_update_on_spike=2.0)),
    "padded-experts": (1, PADDED),
    "ramp-up": (1, dict(FULL, rampup_batch_size=(2, 2, 8), train_iters=8, num_layers=1)),
    "tp": (2, dict(PARTS, tp_size=2)),
    "tp-sp": (2, dict(FULL, tp_size=2, sequence_parallel=True)),
    "pp": (2, dict(FULL, pipeline_model_parallel_size=2)),
    "zero1": (2, dict(use_distributed_optimizer=True, overlap_grad_reduce=True, bf16=True)),
}


def _config(folder, name, **training):
    settings = dict(train_iters=5, eval_iters=0) | RUNS[name][1] | training
    return tiny_run(metrics=folder / "m", save=str(folder), **settings)


def _run(rank, world_size, folder, name, training):
    """Trains. Returns the number of steps that ran without a graph."""
    eager = 0
    with built(_config(folder, name, **training), captures=bool(training)) as trainer:
        real = trainer.runner.train

        def counting(*args, **options):
            nonlocal eager
            eager += 1
            return real(*args, **options)

        trainer.runner.train = counting
        trainer.run()
    return eager


def _both(folder, name):
    """Runs with a graph and without. The calls of the step's Python in each."""
    return [
        run_ranks(_run, RUNS[name][0], folder / str(bool(training)), name, training)[0]
        for training in ({}, GRAPH)
    ]


def check_same_bits(folder, name):
    steps = _config(folder, name).training.train_iters
    plain, captured = _both(folder, name)
    assert rows(folder / "True" / "m") == rows(folder / "False" / "m")
    assert step_bytes(folder / "True", steps) == step_bytes(folder / "False", steps)
    # three warm steps, and two runs of the capture; with a ramp for both numbers of micro-batches
    assert (plain, captured) == (steps, 3 + 2 + (1 + 2 if name == "ramp-up" else 0))


@pytest.mark.runs
@pytest.mark.parametrize("name", RUNS)
def test_a_captured_run_has_the_bits_of_one_without_graphs(tmp_path, name):
    """Losses, weights, moments and random states. Dropout is on, and the learning rate moves."""
    check_same_bits(tmp_path, name)


def test_a_step_that_reads_a_value_is_named_with_the_flag(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        real = StageRunner.train

        def reading(self, *args, **options):
            loss = real(self, *args, **options)
            return loss * float(loss.item() > -1.0)

        patch.setattr(StageRunner, "train", reading)
        with pytest.raises(InputError) as caught:
            _run(0, 1, tmp_path, "none", GRAPH)
    message = str(caught.value)
    for words in ("--cuda-graph-impl", "train_step", "_local_scalar_dense", "impl none"):
        assert words in message, message
