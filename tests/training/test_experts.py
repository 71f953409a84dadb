"""Runs of models with experts: alike in every layout, and resumed to the bit."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.memory.predict.step_peak import step_peak
from megatron_lite.recompute.schedule import plan_stage
from tests.support.equality import GATHERED, SENT
from tests.support.runs import rows, run_on_ranks, step_bytes, tiny_run

MODEL = dict(
    num_layers=4,
    swiglu=True,
    ffn_hidden_size=64,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    num_experts=4,
    moe_layer_freq=2,
    moe_shared_expert_intermediate_size=32,
    moe_router_dtype="fp64",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.1,
)
TP2 = dict(tensor_model_parallel_size=2)
SP2 = dict(TP2, sequence_parallel=True)
WHOLE = dict(SP2, expert_tensor_parallel_size=1)  # ranks of TP share no expert
SHARED = dict(SP2, tensor_model_parallel_size=4, expert_tensor_parallel_size=2)
INSTANCES_OF_STATES = dict(num_distributed_optimizer_instances=2)
LAYOUTS = {
    "tp2": TP2,
    "tp2-sp": SP2,
    "pp2": dict(pipeline_model_parallel_size=2),
    "cp2": dict(context_parallel_size=2),
    "zero1": {},
    "fsdp2": {},
    "ep2": SENT,
    "ep2-allgather": GATHERED,
    "ep2-zero1-whole": SENT,
    "ep2-cp2": dict(SENT, context_parallel_size=2),
    "tp2-etp1": WHOLE,
    "ep2-tp2": SP2 | SENT,
    "ep2-pp2": dict(SENT, pipeline_model_parallel_size=2),
    "ep2-zero1": SENT,
    "ep2-zero1-instances": SENT | INSTANCES_OF_STATES,
    "tp2-etp1-zero1-instances": WHOLE | INSTANCES_OF_STATES,
    "ep2-tp4-etp2": SHARED | SENT,
    "tp4-etp2-zero1": SHARED,
    "ep4-tp2-etp1": dict(SENT | WHOLE, expert_model_parallel_size=4),
}
# Experts with biases, and with a capacity. Its share is that of one router, as in one process.
BIASED = dict(
    add_bias_linear=True,
    moe_shared_expert_intermediate_size=None,
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.2),
)
DROPPED = dict(moe_expert_capacity_factor=0.8, moe_token_drop_policy="position")
PADDED = dict(
    moe_expert_capacity_factor=0.8,
    moe_pad_expert_input_to_capacity=True,
    moe_router_enable_expert_bias=False,
    moe_router_bias_update_rate=1e-3,
)
ODD = {
    "ep2, biases, dropped": ("ep2", {**BIASED, **DROPPED}),
    "ep2-allgather, biases, padded": ("ep2-allgather", {**BIASED, **PADDED}),
    "ep2, padded": ("ep2", PADDED),
    "ep2-allgather, dropped": ("ep2-allgather", DROPPED),
    "ep2-pp2, dropped": ("ep2-pp2", DROPPED),
    "ep2-tp2, biases": ("ep2-tp2", BIASED),
    "ep2-tp4-etp2, biases": ("ep2-tp4-etp2", BIASED),
    "tp2, biases, padded": ("tp2", {**BIASED, **PADDED}),
    "tp2-etp1, biases": ("tp2-etp1", BIASED),
}
INSTANCES = ("ep2-zero1-instances", "tp2-etp1-zero1-instances")
ON_FOUR = (
    "ep2-tp2",
    "ep2-pp2",
    "ep2-zero1",
    "ep4-tp2-etp1",
    "ep2-tp4-etp2",
    "tp4-etp2-zero1",
    *INSTANCES,
)
ZERO1 = dict(use_distributed_optimizer=True)
DATA_PARALLEL = {
    "fsdp2": dict(use_torch_fsdp2=True),
    "ep2-zero1": dict(
        ZERO1, overlap_grad_reduce=True, ddp_bucket_size=3000, overlap_param_gather=True
    ),
    # "whole": with one copy of an expert
    **dict.fromkeys(
        (*INSTANCES, "zero1", "tp4-etp2-zero1", "ep2-zero1-whole", "ep4-tp2-etp1"), ZERO1
    ),
}


def config_of(layout, metrics, **checkpoint):
    return tiny_run(
        train_iters=6,
        exit_interval=checkpoint.pop("until", None),
        metrics=metrics,
        log_interval=1,
        **LAYOUTS.get(layout, {}),
        **DATA_PARALLEL.get(layout, {}),
        **{**MODEL, **checkpoint},
    )


def train(layout, metrics, **settings):
    """Trains on the ranks of a layout; "" is one rank."""
    ranks = 4 if layout in ON_FOUR else 2 if layout else 1
    run_on_ranks(config_of(layout, metrics, **settings), ranks)


def outcome(path):
    names = ("lm_loss", "grad_norm", "load_balancing_loss", "z_loss", "expert_imbalance")
    found = [[row[name] for name in names] for row in rows(path)]
    for row in rows(path):
        assert row["activation_bytes_predicted"] == row["activation_bytes_measured"]
        # other ranks' experts have some of the rows, and where tokens are dropped there are fewer
        assert 0.5 < row["activation_bytes_balanced"] / row["activation_bytes_measured"] < 1.1
        assert 1.0 <= row.get("expert_rank_imbalance", 1.0) <= row["expert_imbalance"]
    return found


@cache
def of_one_process(**settings):
    """Returns the outcome and the first row of a run of one process."""
    with TemporaryDirectory() as folder:
        metrics = Path(folder) / "run.jsonl"
        train("", metrics, until=4, **settings)
        return outcome(metrics), rows(metrics)[0]


def test_a_balance_over_all_ranks_is_that_of_one_process(tmp_path):
    """One micro-batch of two samples, and one of one sample on each of two ranks."""
    found = []
    for layout, size in (("", 2), ("zero1", 1)):
        train(
            layout,
            tmp_path / str(size),
            micro_batch_size=size,
            global_batch_size=2,
            moe_router_load_balancing_type="global_aux_loss",
        )
        found.append([one[1:3] for one in outcome(tmp_path / str(size))])
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, rel=2e-5)


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:3], *ODD, *list(LAYOUTS)[3:]])
def test_every_layout_trains_as_one_process_does(layout, tmp_path):
    """Losses, the biases' steps (which the later choices show), and kept bytes to the byte."""
    metrics, (layout, settings) = tmp_path / "run.jsonl", ODD.get(layout, (layout, {}))
    train(layout, metrics, until=4, **settings)
    one, row = of_one_process(**settings)
    for expected, found in zip(one, outcome(metrics), strict=True):
        assert found == pytest.approx(expected, rel=2e-5)
    if "moe_expert_capacity_factor" not in settings:  # all rows are here, whoever has them
        assert row["activation_bytes_balanced"] == row["activation_bytes_measured"]


@pytest.mark.runs(daily=3, ci=3)
@pytest.mark.parametrize(
    "action, layout",
    [
        ("ops(matmul/2)", ""),
        # only a replay of the router keeps its choice on the device
        ("shared_experts@host", ""),
        ("moe+shared_experts@host", ""),
        ("moe", "ep2"),
        ("moe_act@host", "ep2-allgather"),
        ("full", "ep2"),
        ("ops(matmul,collective)", "ep2"),
    ],
)
def test_a_policy_keeps_what_is_predicted_given_the_rows(action, layout, tmp_path):
    metrics = tmp_path / "run.jsonl"
    # rows that torch's grouped product refuses
    odd = dict(moe_ffn_hidden_size=62, bf16=True) if "/2" in action else {}
    train(layout, metrics, until=1, recompute_policy=f"*:{action}", **odd)
    assert outcome(metrics)


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize(
    "layout",
    [
        "ep2, biases, dropped",
        "tp2-etp1",
        "ep2-zero1-whole",
        "ep2",
        "tp2-etp1, biases",
        "tp4-etp2-zero1",
        "ep2-tp4-etp2, biases",
    ],
)
def test_a_run_goes_on_to_the_bit_however_its_experts_were_spread(layout, tmp_path):
    layout, settings = ODD.get(layout, (layout, {}))
    if settings:
        settings = dict(settings, moe_input_jitter_eps=0.1)
    if layout in ON_FOUR:  # which are slow
        settings = dict(settings, num_layers=2)

    def run(name, save, load=None, layout=layout, **until):
        train(
            layout,
            tmp_path / f"{name}.jsonl",
            **settings,
            save=str(tmp_path / save),
            load=load and str(tmp_path / load),
            **until,
        )

    run("w", "whole")
    run("p", "parts", until=3)
    run("p", "parts", "parts")
    # A rank keeps the rows that it receives. The log has those of a start's first iteration.
    resumed, unbroken = (
        [{name: value for name, value in row.items() if "_bytes_" not in name} for row in found]
        for found in (rows(tmp_path / "p.jsonl"), rows(tmp_path / "w.jsonl"))
    )
    assert resumed == unbroken
    expected = step_bytes(tmp_path / "whole", 6)
    assert expected and step_bytes(tmp_path / "parts", 6) == expected
    # The files do not tell how the experts were spread: one process reads them and writes the same.
    run("1", "again", "parts", layout="")
    run("2", "other", "again")
    found = step_bytes(tmp_path / "other", 6)
    names = [name for name in expected if "rng" not in name]
    assert names and all(found[name] == expected[name] for name in names)


@pytest.mark.parametrize("settings", [{}, DROPPED, PADDED])
def test_a_stated_imbalance_gives_the_fullest_rank_so_many_rows(settings):
    """At most as many as the experts' capacities; padded ones have these in any case."""
    even, full = (
        config_of("ep2", Path("unused"), plan_moe_imbalance=imbalance, **settings)
        for imbalance in (1.0, 1.5)
    )
    plan = plan_stage(RecomputeConfig(), 4)
    tokens = full.data.seq_length * full.training.micro_batch_size
    whole = math.ceil(tokens * 2 / 4 * 0.8) * 4 if settings else 10**9
    rows, balanced = (
        whole if settings == PADDED else min(whole, int(times * 2 * tokens)) for times in (1.5, 1.0)
    )
    found, expected, least = (
        activation_bytes(plan, sizes)
        for sizes in (
            Sizes.of(full, device="cpu"),
            replace(Sizes.of(even, device="cpu"), expert_rows=((rows, balanced),) * 4),
            Sizes.of(even, device="cpu"),
        )
    )
    assert found == expected and (found > least) == (rows > balanced) == (settings == {})
    peaks = [step_peak(one, 0, device="cpu", dp_size=2).num_bytes for one in (even, full)]
    assert (peaks[1] > peaks[0]) == (settings == {})
