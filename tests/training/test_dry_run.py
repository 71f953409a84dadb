"""A dry run has the memory of a real run of the same rank, to the byte.

The start of a run: what it does not import, and the memory of a large model's rank.
"""

import pytest
import torch

from arguments import parse_args
from megatron_lite.cli.explanation import print_instead
from megatron_lite.cli.flags import ParsedArguments
from megatron_lite.config.checks import InputError
from megatron_lite.config.dry_run_settings import DryRunConfig
from megatron_lite.memory.explain.recompute_report import explain
from megatron_lite.memory.measure.step_meter import HELD, HOST, PHASES, STATES
from megatron_lite.parallel.collectives import gloo_has_freed
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.state import parallel_state
from megatron_lite.pipeline.executor import Links
from megatron_lite.training.dry_run import SameTokens, dry_run, measure_step, sample_shape
from pretrain_gpt import main
from tests.support.commands import MOCK, SMALL_MODEL, SMALL_RUN, python, status_of
from tests.support.ranks import run_ranks

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 "
    "--seq-length 16 --micro-batch-size 3 --vocab-size 98 --distributed-backend gloo"
)
FLAGS = ("--micro-batch-size", "2", "--vocab-size", "98", "--distributed-backend", "gloo")
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--attention-dropout 0 --hidden-dropout 0"
)
TP, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
PP, FULL = "--pipeline-model-parallel-size 2", "--recompute-granularity full --recompute-method"
VP = f"{PP} --num-virtual-stages-per-pipeline-rank 2"
ZERO1 = "--use-distributed-optimizer"
ON_HOST = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
DEEP = "--pipeline-model-parallel-size 8"
SINKHORN = "--num-experts 4 --moe-router-load-balancing-type sinkhorn"
# Each case: the ranks, the micro-batches of a step on each rank, the flags.
CASES = [
    (1, 2, ""),
    (1, 1, f"--bf16 {LLAMA}"),
    (1, 2, "--bf16 --recompute-policy 0:full@host;*:none@host"),
    (2, 2, f"{SP} --bf16 --recompute-activations"),
    (2, 2, f"{ZERO1} --bf16 --overlap-grad-reduce --overlap-param-gather"),
    (2, 3, f"{PP} --bf16"),
    (2, 1, "--use-torch-fsdp2 --bf16"),
    (2, 2, f"{ZERO1} --bf16 {ON_HOST} --use-precision-aware-optimizer --exp-avg-dtype bf16"),
    (1, 2, f"--bf16 --loss-chunk-size 8 {FULL} uniform --recompute-num-layers 2"),
    (1, 2, "--fp16 --optimizer muon"),
    (1, 3, "--recompute-granularity selective --recompute-modules core_attn mlp"),
    (1, 2, "--bf16 --recompute-policy 0:pointwise;1:ops(matmul)"),
    (1, 2, "--recompute-policy *:full@host --contiguous-saved-activations"),
    # More than one block of rows in activations, norms and losses.
    (1, 1, "--hidden-size 256 --micro-batch-size 40"),
    (1, 1, f"--hidden-size 256 --micro-batch-size 40 --vocab-size 3000 --bf16 {LLAMA}"),
    (2, 2, f"{SP} --bf16 --loss-chunk-size 8 {FULL} block --recompute-num-layers 3"),
    (2, 2, f"{TP} {FULL} uniform --distribute-saved-activations"),
    (2, 2, "--bf16 --grad-reduce-in-bf16 --overlap-grad-reduce"),
    (2, 2, "--use-distributed-optimizer --optimizer muon"),
    (2, 2, "--context-parallel-size 2 --attention-dropout 0 --cp-comm-type allgather --bf16"),
    (2, 4, f"{VP} --bf16 {FULL} uniform"),
    (2, 4, f"{PP} --untie-embeddings-and-output-weights --recompute-policy *:full@host"),
    (2, 4, f"{PP} {FULL} uniform --num-microbatches-with-partial-activation-checkpoints 1"),
    (4, 4, f"{PP} {SP} --bf16"),
    (2, 2, f"--use-torch-fsdp2 --bf16 --fsdp-memory-efficient-wrapping {LLAMA}"),
    (2, 1, "--use-torch-fsdp2 --bf16 --hidden-size 512"),
    (4, 2, f"--use-torch-fsdp2 --bf16 {SP} {FULL} uniform"),
    (4, 4, f"--use-torch-fsdp2 --bf16 {PP}"),
    (4, 1, "--use-torch-fsdp2 --bf16 --num-distributed-optimizer-instances 2"),
]


def config_of(flags):
    return parse_args(f"{SMALL} {flags}".split()).config


def real_steps(config, world_size, num_microbatches, *, host_apart=False):
    """The memory of a step of every rank, in a run with values and gloo."""

    def run(rank, world_size):
        # When a sent tensor is freed depends on the receiver. Here it is as early as can be: before
        # the next action.
        with (
            pytest.MonkeyPatch.context() as patch,
            parallel_state(config.parallel, seed=1) as parallel,
            gloo_has_freed(),
        ):
            patch.setattr(Links, "forget_sent", Links.wait_sent)
            samples = torch.randint(0, 98, sample_shape(config))
            batches = SameTokens(samples, num_microbatches, parallel)
            return measure_step(config, parallel, batches, host_apart=host_apart)

    return run_ranks(run, world_size)


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("world_size, num_microbatches, flags", CASES)
def test_each_rank_has_the_memory_of_a_real_one(world_size, num_microbatches, flags):
    # Four layers are for virtual stages, and for units of several layers.
    several = VP in flags or "num-layers" in flags
    config = config_of(flags if several else f"{flags} --num-layers 2")
    dry = [
        dry_run(config, rank, world_size=world_size, num_microbatches=num_microbatches)
        for rank in range(world_size)
    ]
    assert [one.measured for one in dry] == real_steps(config, world_size, num_microbatches)
    for one in dry:
        held = {kind: one.measured.held[kind] for kind in STATES}
        assert tuple(held.values()) == one.states[:4]
        peak = one.measured.peak
        assert sum(peak.by_category.values()) == peak.num_bytes > sum(held.values())
        assert set(peak.by_category) == {*HELD, *PHASES, HOST}


def test_beside_a_gpu_host_memory_is_no_part_of_the_peak():
    config = config_of("--num-layers 2 --recompute-policy *:none@host --no-torch-compile")
    (whole, apart) = (
        dry_run(config, 0, world_size=1, device=device, num_microbatches=1).measured
        for device in ("cpu", "cuda")
    )
    assert [apart] == real_steps(config, 1, 1, host_apart=True)
    assert HOST not in apart.peak.by_category
    assert apart.host_bytes == whole.host_bytes == explain(config, "cpu").own.host_bytes > 0
    assert whole.peak.num_bytes == apart.peak.num_bytes + whole.host_bytes


@pytest.mark.runs
@pytest.mark.parametrize(
    "world_size, rank, flags",
    [
        (1, 0, "--num-layers 6"),
        (1, 0, f"--num-layers 6 {SINKHORN} --recompute-policy 0-1:none;2-5:ops(matmul)"),
        (1, 0, "--num-layers 5 --recompute-policy *:full/1@host"),
        (8, 7, f"{DEEP} --num-layers 8 --bf16 --global-batch-size 12"),
        (1, 0, f"--num-layers 6 --bf16 --recompute-policy *:full/1 {LLAMA}"),
        (8, 2, f"{DEEP} --num-layers 40 --bf16 --global-batch-size 60"),
        (2, 1, f"{SP} --num-layers 9 --bf16 --recompute-policy 0-3:mlp+layernorm;4-8:ops(matmul)"),
        (2, 0, "--use-torch-fsdp2 --bf16 --num-layers 6 --global-batch-size 12"),
    ],
)
def test_a_step_that_is_derived_from_smaller_ones_has_the_memory_of_the_whole(
    world_size, rank, flags
):
    config, told = config_of(flags), []
    derived = dry_run(config, rank, world_size=world_size, told=told.append)
    whole = dry_run(config, rank, world_size=world_size, in_full=True)
    assert derived.is_derived == (len(told) > 1) == ("--num-layers 8 --bf16 --g" not in flags)
    ours, theirs = derived.measured, whole.measured
    assert (ours.held, ours.host_bytes) == (theirs.held, theirs.host_bytes)
    assert ours.peak.by_category == theirs.peak.by_category
    assert ours.peak.num_bytes == theirs.peak.num_bytes


@pytest.mark.long
def test_a_step_whose_memory_is_not_linear_runs_in_full(monkeypatch):
    """As if nothing were kept."""
    config = config_of("--num-layers 5")
    monkeypatch.setattr("megatron_lite.training.dry_run.most_in_flight", lambda **_: 0)
    assert not dry_run(config, 0, world_size=1).is_derived


@pytest.mark.runs
@pytest.mark.parametrize(
    "world_size, rank, flags, loss_bytes",
    [
        (1, 0, "--num-layers 2", 4),
        (2, 0, f"{PP} --bf16 --num-layers 2", 0),
        (2, 1, f"{PP} --bf16", 4),
        (2, 0, "--use-torch-fsdp2 --bf16", 4),
        (2, 1, f"{VP} --bf16 --recompute-activations", 4),
    ],
)
def test_more_micro_batches_than_it_runs_by_itself_add_their_losses_only(
    world_size, rank, flags, loss_bytes
):
    config = config_of(f"{flags} --global-batch-size 48")
    own = dry_run(config, rank, world_size=world_size, in_full=True)
    number = own.measured.num_microbatches
    assert number < own.num_microbatches
    more = dry_run(config, rank, world_size=world_size, num_microbatches=number + 2)
    peaks = own.measured.peak, more.measured.peak
    assert peaks[1].num_bytes - peaks[0].num_bytes == 2 * loss_bytes
    assert peaks[1].moment == peaks[0].moment


def test_the_default_ranks_are_the_first_of_each_kind():
    even = config_of(f"{SP} --pipeline-model-parallel-size 8 --num-layers 16")
    assert DryRunConfig().ranks(even.stages(), world_size=64) == [0, 8, 56]
    uneven = config_of(
        f"{PP} --pipeline-model-parallel-size 4 --num-layers 7 "
        "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
    )
    assert DryRunConfig().ranks(uneven.stages(), world_size=4) == [0, 1, 3]


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--dry-run-memory --dry-run-ranks 0,5000 --dry-run-world-size 1024",
            "--dry-run-ranks 0,5000: a world of 1024 ranks has the ranks 0 to 1023: give some of "
            "them, or a larger --dry-run-world-size",
        ),
        ("--dry-run-ranks 0", "--dry-run-ranks 0 needs --dry-run-memory"),
        (
            "--dry-run-memory --dry-run-world-size 3 --pipeline-model-parallel-size 2",
            "--dry-run-world-size 3 is not a multiple of 2, the ranks of one model (tensor- x "
            "context- or experts' x pipeline-parallel): give a multiple",
        ),
        (
            "--dry-run-memory --dry-run-world-size 4 --global-batch-size 6",
            "--global-batch-size 6 is not divisible by --micro-batch-size 2 x data-parallel size "
            "4 = 8",
        ),
        (
            "--dry-run-memory --explain-recompute",
            "--dry-run-memory excludes --explain-recompute: each prints something else and stops. "
            "Leave one of them out",
        ),
    ],
)
def test_a_fault_in_the_flags_is_one_line_and_status_2(flags, message, capsys):
    assert status_of(main, [*SMALL_MODEL, *FLAGS, *flags.split()]) == 2
    assert capsys.readouterr() == ("", f"pretrain_gpt.py: error: {message}\n")


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--torch-compile --activation-memory-budget 0.5",
            "--dry-run-memory cannot follow --activation-memory-budget",
        ),
        ("--recompute-verify", "--dry-run-memory cannot follow --recompute-verify"),
        ("--hidden-size 40000000000", "no tensor can have these sizes"),
    ],
)
def test_what_a_dry_run_cannot_follow_is_refused(flags, message):
    with pytest.raises(InputError, match=f"^{message}"):
        dry_run(config_of(flags), 0, world_size=1)


def test_under_a_launcher_only_rank_0_runs(capsys):
    dry_run = DryRunConfig(dry_run_ranks=(3,))
    asked = ParsedArguments(config_of(f"{PP} --bf16"), "dry_run_memory", dry_run, ())
    for rank in (0, 1):
        print_instead(asked, Launch(launcher="torchrun", rank=rank, world_size=4))
        text = capsys.readouterr().out
        assert ("4 ranks" in text and "rank 3" in text) if rank == 0 else text == ""


# Each takes a large part of a second, and such a run needs none of them. torch.autograd.backward
# imports sympy once a replay of a whole layer or of core attention gives it a gradient.
SLOW_IMPORTS = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor")
SLOW_IMPORTS += ("tensorboard", "transformers", "scipy", "matplotlib", "wandb")


def test_a_run_with_a_log_and_a_checkpoint_imports_nothing_slow(tmp_path):
    words = [*SMALL_RUN, *MOCK, "--train-iters", "2"]
    words += ["--save", str(tmp_path / "saved"), "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    words += ["--recompute-policy", "*:pointwise", "--eval-iters", "0"]
    found = python(
        "import sys\n"
        "from pretrain_gpt import main\n"
        f"assert main({words!r}) == 0\n"
        f"print('slow:', *[name for name in {SLOW_IMPORTS!r} if name in sys.modules])"
    )
    assert found.stdout.splitlines()[-1].split() == ["slow:"]


@pytest.mark.long
def test_a_rank_of_a_large_model_never_holds_a_whole_weight():
    """Under a limit of the address space, in which one whole matrix of the MLP has no room."""
    printed = python("""if True:
        import resource
        import torch
        from megatron_lite.api import run_config
        from megatron_lite.memory.measure.step_meter import SimulatedTensors, simulated_rank
        from megatron_lite.training.build_trainer import build_stages

        config = run_config(
            preset="llama3-8b", seq_length=8192, micro_batch_size=1, bf16=True,
            tensor_model_parallel_size=8, pipeline_model_parallel_size=32,
        )
        with simulated_rank(
            config.parallel, SimulatedTensors(), rank=8 * 16 + 3, world_size=256
        ) as parallel:
            torch.zeros(8, 8) @ torch.zeros(8, 8)  # what the libraries map at their first use
            pages = int(open("/proc/self/statm").read().split()[0])
            most = pages * resource.getpagesize() + 300_000_000
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            try:
                torch.empty(28672, 4096)
            except RuntimeError:
                pass
            else:
                raise AssertionError("the limit does not keep a whole weight out")
            (stage,) = build_stages(config, parallel)
            print(sum(weight.numel() for weight in stage.parameters()))
    """)
    h, ffn, heads, groups = 4096, 14336, 32, 8
    matrices = h * (h + 2 * groups * h // heads) + h * h + 3 * h * ffn
    assert int(printed.stdout) == matrices // 8 + 2 * h
