"""The time of a step: against FLOPs and collectives counted elsewhere, and the order in which any
user would rank runs."""

from dataclasses import replace
from functools import partial

import pytest

from megatron_lite.api import run_config
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import PolicyFlops
from megatron_lite.plan.hardware import Group, Link, load_hardware
from megatron_lite.plan.policies import layer_choices
from megatron_lite.plan.stage_time import FSDP, HOST_COPIES, HOST_PACE
from megatron_lite.plan.step_time import (
    HOST_UPDATE,
    OPTIMIZER,
    REDUCTION,
    WEIGHT_GATHERS,
    step_time,
)
from megatron_lite.plan.work import (
    BACKWARD_MATMULS,
    FORWARD_MATMULS,
    REPLAYED_MATMULS,
    TENSOR_PARALLEL,
    Clock,
)
from megatron_lite.recompute.schedule import plan_stage
from tests.plan.machines import flash, ideal, talking
from tests.support.changes import with_settings
from tests.support.traffic import plan_collectives

A100 = load_hardware("a100-80gb")
LAYERS, SEQ_LENGTH = 8, 2048
RUN = run_config(
    num_layers=LAYERS,
    hidden_size=4096,
    num_attention_heads=32,
    max_position_embeddings=SEQ_LENGTH,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    micro_batch_size=1,
    global_batch_size=64,
    bf16=True,
    seq_length=SEQ_LENGTH,
    vocab_size=32767,
)
MODEL = RUN.model
run = partial(with_settings, RUN)


def seconds(config, num_ranks=8, machine=A100):
    return step_time(config, machine, num_ranks).seconds


# A flash kernel skips half of its products, which the FLOPs of the logs count.
HALF = replace(ideal(), bf16=replace(ideal().bf16, flash=flash(0.5)))
TP8 = dict(tensor_model_parallel_size=8)
PP4 = dict(pipeline_model_parallel_size=4)
POLICIES = (
    "*:none",
    "*:core_attn",
    "*:mlp",
    "0-3:full; *:none",
    "*:full",
    "*:full/4",
    "*:ops(matmul)",
)


def flops_of(config, policy="*:none"):
    """Returns the hardware FLOPs of a step with the policy."""
    sizes = replace(Sizes.of(config, "cuda"), micro_batch_size=64)
    plan = plan_stage(RecomputeConfig(recompute_policy=policy), LAYERS)
    return PolicyFlops.of(sizes, plan).hardware


@pytest.mark.parametrize("backend", ["unfused", "flash"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tp", [1, 4])
def test_on_an_ideal_machine_a_step_takes_its_PolicyFlops(policy, tp, backend):
    config = run(attention_backend=backend, recompute_policy=policy, tensor_model_parallel_size=tp)
    machine = ideal() if backend == "unfused" else HALF
    time = step_time(config, machine, 8)
    assert time.seconds == pytest.approx(flops_of(config, policy) / 8 / 1e12, rel=1e-6)
    matmuls = FORWARD_MATMULS, BACKWARD_MATMULS, REPLAYED_MATMULS
    assert sum(time.terms.get(term, 0.0) for term in matmuls) == pytest.approx(time.seconds)


def test_attention_to_packed_documents_takes_the_share_that_is_attended():
    config = run()
    packed = run(reset_attention_mask=True, plan_attended=0.25)
    flops, with_one_more = flops_of(config), flops_of(config, "*:core_attn")
    # two products in forward, and five in backward
    expected = flops - 0.75 * 3.5 * (with_one_more - flops)
    assert seconds(packed, machine=HALF) == pytest.approx(expected / 8 / 1e12, rel=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("policy", ["*:none", "*:full", "*:mlp", "*:ops(matmul)"])
def test_collectives_that_nothing_hides_take_the_time_of_those_that_are_issued(
    policy, sequence_parallel
):
    config = run(recompute_policy=policy, **TP8, sequence_parallel=sequence_parallel)
    machine = talking(1e-6, 1e11)
    traffic = plan_collectives(
        plan_stage(config.recompute, LAYERS, 0), Sizes.of(config, device="cuda")
    )
    issued = [*traffic.forward, *traffic.backward, *traffic.replay]
    expected = 64 * sum(machine.collective_seconds(one, Group(8)) for one in issued)
    found, hidden = (
        step_time(config, one, 8).terms[TENSOR_PARALLEL]
        for one in (machine, replace(machine, shares_cores=False))
    )
    assert found == pytest.approx(expected) and 0.3 * expected < hidden < expected


@pytest.mark.parametrize("layout", [dict(), TP8, PP4])
def test_more_recomputation_is_never_faster(layout):
    policies = ["*:none", "*:layernorm", "*:layernorm+activation", "*:mlp+layernorm", "*:full"]
    found = [step_time(run(recompute_policy=policy, **layout), A100, 16) for policy in policies]
    times = [one.seconds for one in found]
    assert all(min(one.terms.values()) > 0.0 for one in found)
    assert times == sorted(times) and len(set(times)) == len(times)
    whole = seconds(run(recompute_policy="*:full", recompute_tail_skip=False, **layout), 16)
    assert whole > times[-1]
    if layout == PP4:
        kept = dict(num_microbatches_with_partial_activation_checkpoints=1)
        assert seconds(run(recompute_policy="*:full", **kept, **layout), 16) < times[-1]


@pytest.mark.parametrize(
    "data_parallel",
    [
        dict(),
        dict(use_distributed_optimizer=True),
        dict(overlap_grad_reduce=True),
        dict(use_torch_fsdp2=True),
    ],
)
def test_more_data_parallel_ranks_are_never_slower_at_the_same_batch(data_parallel):
    config = run(global_batch_size=512, **data_parallel)
    times = [seconds(config, ranks) for ranks in (8, 16, 32, 64, 128)]
    assert times == sorted(times, reverse=True)


def test_a_reduction_beside_backward_is_never_slower():
    def time(**data_parallel):
        return step_time(run(**data_parallel), A100, 16)

    alone, beside = time(), time(overlap_grad_reduce=True)
    assert 0.0 < beside.terms[REDUCTION] < alone.terms[REDUCTION]
    assert beside.seconds < alone.seconds
    sharded = time(use_distributed_optimizer=True)
    assert sharded.terms[OPTIMIZER] == pytest.approx(alone.terms[OPTIMIZER] / 16)
    # A reduce-scatter is half of an all-reduce, and 16-bit weights come back.
    assert sharded.terms[REDUCTION] == pytest.approx(alone.terms[REDUCTION] / 2)
    assert sharded.terms[WEIGHT_GATHERS] < sharded.terms[REDUCTION]
    gathers = time(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    assert gathers.terms[WEIGHT_GATHERS] < sharded.terms[WEIGHT_GATHERS]
    assert time(grad_reduce_in_bf16=True).terms[REDUCTION] < alone.terms[REDUCTION]


@pytest.mark.parametrize("kind", ["use_distributed_optimizer", "use_torch_fsdp2"])
def test_instances_inside_nodes_send_less_between_them(kind):
    """Across 4 nodes goes a sum of 1/8 of the gradients on each of 8 cards: 2 x 3/4 of what they
    send together, instead of a reduce-scatter of 31/32. No weights do."""
    slow = replace(A100, between=Link(latency_s=0.0, bandwidth=1e9))

    def time(instances):
        shared = {kind: True, "num_distributed_optimizer_instances": instances}
        return step_time(run(global_batch_size=128, **shared), slow, 32)

    whole, inside = time(1), time(4)
    if kind == "use_torch_fsdp2":
        assert inside.terms[FSDP] < 0.85 * whole.terms[FSDP]  # no gather of weights
    else:
        assert inside.terms[OPTIMIZER] == pytest.approx(4 * whole.terms[OPTIMIZER])
        assert inside.terms[WEIGHT_GATHERS] < 0.1 * whole.terms[WEIGHT_GATHERS]
        across = inside.terms[REDUCTION] / whole.terms[REDUCTION]
        assert across == pytest.approx(1.5 * 32 / 31, rel=0.05)


def test_fsdp2_gathers_for_every_micro_batch_and_twice_if_weights_are_freed():
    slow = replace(A100, inside=Link(latency_s=0.0, bandwidth=1e9))

    def gathers(micro=1, **data_parallel):
        config = run(micro_batch_size=micro, use_torch_fsdp2=True, **data_parallel)
        return step_time(config, slow, 8).terms[FSDP]

    assert gathers(torch_fsdp2_reshard_after_forward=False) < gathers()
    assert gathers(micro=2) < gathers()
    assert FSDP not in step_time(run(use_torch_fsdp2=True), A100, 1).terms


def test_copies_to_the_host_are_hidden_where_the_bandwidth_is_high_enough():
    def time(bandwidth, policy="*:none@host", **changes):
        machine = replace(A100, host_bandwidth=bandwidth, **changes)
        return step_time(run(recompute_policy=policy), machine, 8)

    slow, fast = time(1e9), time(1e12)
    assert fast.seconds >= seconds(run()) and slow.seconds > 2 * fast.seconds
    assert fast.terms[HOST_COPIES] < 0.01 * fast.seconds < slow.terms[HOST_COPIES]
    # Recomputation leaves only the inputs of layers to copy.
    assert time(1e9, "*:full@host").terms[HOST_COPIES] < 0.2 * slow.terms[HOST_COPIES]
    assert time(1e12, shares_cores=True).terms[HOST_COPIES] > fast.terms[HOST_COPIES]


def test_an_optimizer_on_the_host_takes_its_arithmetic_and_the_copies_that_nothing_hides():
    """Of 12 layers with 4096 x 4096 weights each, embeddings, and vectors that are 0.1% of all."""
    number, machine = LAYERS * 12 * 4096**2 + (32768 + 2048) * 4096, replace(A100, overlap=1.0)

    def taken(machine=machine, overlaps=False, **changes):
        return step_time(
            run(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlaps, **changes),
            machine,
            1,
        ).terms[HOST_UPDATE]

    # one after the other: 4 bytes there, 30 read and written, 2 back
    seconds = number * (6 / A100.host_bandwidth + 30 / A100.host_memory_bandwidth)
    assert taken() == pytest.approx(seconds, rel=2e-3)
    assert taken(optimizer_offload_fraction=0.25) == pytest.approx(taken() / 4)
    # beside each other: clipped on the host, and the last of 8 parts is not hidden
    hidden = number * (4 / 8 / A100.host_bandwidth + 38 / A100.host_memory_bandwidth)
    assert taken(overlaps=True) == pytest.approx(hidden, rel=0.2)
    slow = replace(machine, host_bandwidth=1e9)
    assert taken(overlaps=True) < taken(slow, overlaps=True) < taken(slow)


def test_a_graph_takes_no_time_of_the_host_and_lets_no_tensor_go_there():
    small = dict(hidden_size=256, num_attention_heads=4, recompute_policy="*:full")
    plain, graph = run(**small), run(**small, cuda_graph_impl="full_iteration")
    free = replace(A100, compiled=replace(A100.compiled, launch_s=0.0, replay_s=0.0))
    assert seconds(graph) == seconds(plain, machine=free) < seconds(plain)
    for config, where in ((plain, {"device", "host"}), (graph, {"device"})):
        choices = layer_choices(config, Clock.of(config, A100), host=True)
        assert {one.store for one in choices[0][0]} == where


def test_the_band_is_wider_on_several_ranks_and_where_a_step_waits_for_the_host():
    machine = replace(A100, band_of_several=0.5)
    for hidden, ranks, band in ((256, 1, A100.band), (4096, 2, 0.5)):
        time = step_time(run(hidden_size=hidden), machine, ranks)
        assert time.band == band + time.terms[HOST_PACE] / time.seconds > band
