"""A training step works on a device only: it makes no tensor on the CPU, reads no value, and puts
the uses of each memory by several streams in order.

It runs on a stand-in for a GPU (tests/support/stand_in_device.py), since tests have no GPU.
"""

import itertools

import pytest
import torch.distributed as dist

from arguments import parse_args
from megatron_lite.model import dispatch
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.stand_in_device import run_watched

SMALL = (
    "--hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 3 --vocab-size 98 --distributed-backend gloo"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
GPT = "--bf16"
MODELS = (GPT, f"--bf16 {LLAMA}", "--fp16", "--loss-chunk-size 8", "--optimizer muon")
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
# by name: the ranks, the layers, the micro-batches, the flags
LAYOUTS = {
    "one rank": (1, 2, 2, ""),
    "TP": (2, 2, 1, TP),
    "SP": (2, 2, 1, f"{TP} --sequence-parallel"),
    "CP": (2, 2, 1, "--context-parallel-size 2 --attention-dropout 0"),
    "PP": (2, 2, 3, PP),
    "VP": (2, 4, 2, f"{PP} --num-virtual-stages-per-pipeline-rank 2"),
    "DP, overlap": (2, 2, 2, "--overlap-grad-reduce --ddp-bucket-size 5000"),
    "ZeRO-1, overlap": (
        2,
        2,
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 5000",
    ),
}
POLICIES = (
    "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn mlp",
    "--recompute-policy *:pointwise",
    "--recompute-policy *:ops(matmul)",
    "--recompute-policy *:full@host",
    "--recompute-policy *:none@host",
    "--recompute-policy *:full@host --contiguous-saved-activations",
)
# one of each layout, and every policy somewhere
SHORT = (
    ("one rank", GPT, POLICIES[6], 1),
    ("SP", MODELS[1], POLICIES[3], 1),
    ("PP", GPT, POLICIES[5], 1),
    ("ZeRO-1, overlap", GPT, POLICIES[1], 2),
)


def faults(layout, model, policy, steps):
    """Returns the faults of the last rank of the layout."""
    ranks, num_layers, num_microbatches, flags = LAYOUTS[layout]
    text = f"{SMALL} --num-layers {num_layers} {model} {flags} {policy}"
    config = parse_args(text.split()).config
    return run_watched(
        config, ranks - 1, world_size=ranks, num_microbatches=num_microbatches, steps=steps
    )


def faults_of(*cases):
    """Returns the faults of the cases that have some. They run in a process of their own."""

    def run(rank, world_size):
        dist.destroy_process_group()  # the simulated ranks have groups of their own
        return {case: found for case in cases if (found := faults(*case))}

    return run_ranks(run, 1)[0]  # torch's fake groups have no DETAIL mode


def check_short_case(number):
    assert faults_of(SHORT[number]) == {}


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize("number", range(len(SHORT)))
def test_a_step_reads_nothing_and_stays_on_its_device(number):
    check_short_case(number)


@pytest.mark.long
def test_padded_experts_ask_for_no_number_of_rows(monkeypatch):
    """So a CUDA graph may have them."""
    monkeypatch.setattr(dispatch, "numbers", None)  # fake numbers would hide a wait
    padded = (
        f"{MODELS[1]} --num-experts 4 --moe-aux-loss-coeff 0.1 --moe-pad-expert-input-to-capacity "
        "--moe-expert-capacity-factor"
    )
    policy = "--recompute-policy *:moe"
    assert parse_args(f"{SMALL} --num-layers 2 {padded} 1 --cuda-graph-impl full_iteration".split())
    assert faults_of(("one rank", f"{padded} 0.7", policy, 1)) == {}


@pytest.mark.long
def test_so_does_every_layout_and_every_policy():
    """Every layout and every policy once, in turns of models."""
    models = itertools.cycle(MODELS)
    pairs = sampled(itertools.product(LAYOUTS, POLICIES), every=9, at_most=3)
    assert {layout for layout, _ in pairs} == set(LAYOUTS)
    assert {policy for _, policy in pairs} == set(POLICIES)
    assert faults_of(*((layout, next(models), policy, 1) for layout, policy in pairs)) == {}
