"""The report of --explain-recompute: its figures add up and are those of the run, and each note is
made where it holds, and only there."""

import functools
from collections import Counter

import pytest

from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.explain.recompute_report import explain, likely_device
from megatron_lite.memory.explain.report_text import report_text
from megatron_lite.memory.predict.flops import replay_flops
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.recompute.schedule import plan_stage
from tests.support.commands import parsed_line
from tests.support.traffic import plan_collectives, summed

NEEDED = "--micro-batch-size 3 --vocab-size 98 "
TINY = NEEDED + (
    "--num-layers 5 --hidden-size 32 --num-attention-heads 4 --seq-length 12 "
    "--max-position-embeddings 12 "
)
LLAMA = TINY + (
    "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --attention-backend flash --untie-embeddings-and-output-weights "
)
GPT_22B = (
    "--num-layers 48 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048 "
    "--max-position-embeddings 2048 "
    # 2205.05198 table 3
    "--micro-batch-size 4 --vocab-size 50303 --bf16 --tensor-model-parallel-size 8 "
)
UNFUSED = "--attention-backend unfused "
FULL, SELECTIVE = (
    "--recompute-granularity full --recompute-method ",
    "--recompute-granularity selective --recompute-modules ",
)
POLICIES = [
    "",
    "--recompute-policy 0-1:full/2;2:core_attn+pointwise;3:mlp",
    "--recompute-policy every-2:mlp@host;every-2+1:full@host",
    (
        "--recompute-policy "
        "0-1:ops(matmul,attention);2-3:ops(matmul/2,collective,max,aten.baddbmm.default);4:full"
    ),
    "--recompute-policy 0-1:full/2@host;2:core_attn+pointwise@host;3:none@host;*:ops(matmul)@host",
    FULL + "uniform --recompute-num-layers 2 --no-recompute-tail-skip",
    SELECTIVE + "mlp core_attn --recompute-verify",
]
SPLIT = [
    "--recompute-policy 0-2:full/2@split;3:none;*:full@split",
    "--recompute-policy 0-2:full/2@split+host;3:full@split;*:none --contiguous-saved-activations",
]
TP = "--tensor-model-parallel-size 2 "
RUNS = {
    TINY: POLICIES,
    LLAMA + TP: POLICIES + SPLIT,
    TINY + TP + "--sequence-parallel ": POLICIES,
    TINY + UNFUSED + "--context-parallel-size 2 ": POLICIES,
    LLAMA + TP + "--context-parallel-size 2 --cp-comm-type allgather ": POLICIES,
}
CASES = [(run, policy) for run, policies in RUNS.items() for policy in policies]


@functools.cache
def report_of(words, device="cuda"):
    return explain(parsed_line(words).config, device)


@pytest.mark.runs(daily=12, ci=12)
@pytest.mark.parametrize(
    "run, policy, device",
    [(*case, ("cpu", "cuda")[number % 2]) for number, case in enumerate(CASES)],
)
def test_the_parts_add_up_to_the_whole(run, policy, device):
    report = report_of(run + policy, device)
    sizes, plan = report.sizes, plan_stage(report.config.recompute, 5)
    assert sum(one.count * one.num_layers for one in report.parts) == 5
    assert (
        sum(one.count * one.kept_bytes for one in report.parts)
        == report.own.memory.kept_bytes
        == activation_bytes(plan, sizes)
    )
    moved = sum(one.count * tensor.num_bytes for one in report.parts for tensor in one.moved)
    assert moved == report.own.host_bytes == activation_bytes(plan, sizes, on_host=True)
    again = replay_flops(sizes, plan)
    parts = (one.count * flops for one in report.parts for _, flops in one.replayed)
    assert sizes.num_ranks * sum(parts) == again
    sent = summed(one.traffic for one in report.parts for _ in range(one.count))
    # The order differs: the layers of a group need not be neighbours.
    expected = plan_collectives(plan, sizes)
    for phase in ("forward", "backward", "replay"):
        assert Counter(getattr(sent, phase)) == Counter(getattr(expected, phase))


@pytest.mark.runs
@pytest.mark.parametrize("policy", ["every-2:full", "every-3+1:pointwise@host; every-3:full@host"])
def test_the_parts_of_virtual_stages_add_up_and_more_layers_need_no_more_lines(policy):
    words = (
        f"{TINY} --position-embedding-type rope --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 3 --global-batch-size 24 "
        f"--recompute-policy '{policy}' --num-layers"
    )
    lengths = []
    for number in (36, 144):
        report = report_of(f"{words} {number}", "cpu")
        parts = report.parts
        assert sum(one.count * one.num_layers for one in parts) == number // 2
        assert sum(one.count * one.kept_bytes for one in parts) == report.own.memory.kept_bytes
        lengths.append(len(report_text(report).split("\n")))
    assert abs(lengths[0] - lengths[1]) <= 3


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "words",
    [
        TINY,
        GPT_22B + "--sequence-parallel ",
        GPT_22B + FULL + "uniform --recompute-num-layers 7 --distribute-saved-activations",
    ],
)
def test_the_other_policies_are_priced_as_they_would_be_run(words):
    report = report_of(words)
    config, sizes = report.config, report.sizes
    names = [row.name for row in report.policies]
    assert {"policy every-2:full", "policy *:full@host"} < set(names) and len(set(names)) >= 6
    peaks = [row.step.num_bytes for row in report.policies]
    assert peaks == sorted(peaks, reverse=True)
    splits = sizes.tp_size > 1 and not sizes.sequence_parallel
    assert any("distributed" in name for name in names) == splits
    for row in report.policies:
        plan = plan_stage(row.config.recompute, config.model.num_layers)
        own = Sizes.of(row.config, device="cuda")
        assert row.plan == plan
        assert row.memory.kept_bytes == activation_bytes(plan, own)
        assert row.step == fullest_step_peak(row.config, device="cuda")
    assert sum(row.execution == report.own.execution for row in report.policies) == 1


@pytest.mark.parametrize(
    "backend, visible, devices, expected",
    [
        ("gloo", None, ["/dev/nvidia0"], "cpu"),
        ("nccl", None, [], "cuda"),
        ("auto", None, [], "cpu"),
        ("auto", None, ["/dev/nvidia0"], "cuda"),
        ("auto", "-1", ["/dev/nvidia0"], "cpu"),
    ],
)
def test_the_device_is_the_one_that_training_would_take(
    backend, visible, devices, expected, monkeypatch
):
    monkeypatch.setattr("glob.glob", lambda pattern: devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert likely_device(backend) == expected
