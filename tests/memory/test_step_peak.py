"""The predicted peak of a whole step against the peak of a real one, and the sums behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo  # noqa: F401

from arguments import parse_args
from benchmarks.memory import CASES, SIZES, TWO_RANKS, Case, rows
from megatron_lite.config import row_blocks
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages_of_rank
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.passages import Moment, Passage, joined
from megatron_lite.memory.predict.stage_passages import stage_passages
from megatron_lite.memory.predict.states import rank_states
from megatron_lite.memory.predict.step_peak import fullest_step_peak, step_peak
from megatron_lite.pipeline.order import order
from megatron_lite.recompute.schedule import plan_stage
from tests.support.torch_features import NEEDS_CUSTOM_COLLECTIVES, NEEDS_GRAD_DTYPE

# Each has another kind of plan, and together they have every layout.
IN_EVERY_RUN = (
    "bf16, untied",
    "full/3, dropout",
    "core_attn, layernorm, mlp",
    "pointwise, llama",
    "none@host",
    "full/1, contiguous",
    "TP 2, full/2@split",
    "TP 2, sequence parallel, llama, chunks",
    "PP 2, 2 virtual stages, mlp",
    "DP 2, ZeRO-1",
    "FSDP 2, chunks, full/2",
    "CP 2, unfused, ZeRO-1",
)
PER_CENT = 0.01


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=[] if case.name in IN_EVERY_RUN else pytest.mark.long
        )
        for case in CASES
    ],
)
def test_the_peak_of_a_real_step_is_predicted_within_two_per_cent(case: Case) -> None:
    # The copy of gloo's reduce-scatter is a bound where the update decides.
    most = 12 * PER_CENT if "ZeRO-1" in case.name else 2 * PER_CENT
    for row in rows(case):
        assert -2 * PER_CENT < row.ratio - 1.0 < most, row


@pytest.mark.parametrize("ops", ["matmul", "matmul/2"])
def test_a_layer_holds_its_kept_results_until_its_backward_ends(ops: str) -> None:
    # Attention's backward is the peak, after that of the linear layers whose results are kept.
    flags = "--seq-length 256 --max-position-embeddings 256 --vocab-size 255"
    chosen = f"--attention-backend unfused --recompute-policy *:ops({ops})"
    (row,) = rows(Case(ops, f"{flags} --loss-chunk-size 64 {chosen}"))
    assert row.moment.startswith("backward of core_attention")
    assert abs(row.ratio - 1.0) < PER_CENT / 10, row


@pytest.mark.parametrize("chunk_size", [32, 48])
def test_the_sum_over_chunks_casts_each_product(chunk_size: int) -> None:
    # 32 divides the 64 tokens, and 48 leaves a shorter last chunk.
    flags = "--bf16 --hidden-size 256 --seq-length 32 --num-layers 2 --vocab-size 2047"
    untied = "--no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
    (row,) = rows(Case("chunks", f"{flags} {untied} --loss-chunk-size {chunk_size}", 1, 1))
    assert row.moment.startswith("backward of the output layer")
    assert abs(row.ratio - 1.0) < PER_CENT / 10, row


@NEEDS_CUSTOM_COLLECTIVES
def test_fsdp2_holds_the_cast_sum_over_chunks_while_it_reduces() -> None:
    flags = "--bf16 --use-torch-fsdp2 --loss-chunk-size 64 --untie-embeddings-and-output-weights"
    (row,) = rows(Case("FSDP 2, chunks, untied", flags, 2, 1))
    assert row.moment.startswith("reduction of gradients")
    # The backward of the loss holds nearly as much, and then the cast sum is not there any more.
    assert -PER_CENT / 10 < row.ratio - 1.0 < 3 * PER_CENT, row


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize("untied", ["", "--untie-embeddings-and-output-weights"])
def test_a_large_16_bit_gradient_never_exists_whole(
    untied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "GPU_BYTES", 2**22)
    flags = "--bf16 --hidden-size 256 --seq-length 32 --num-layers 2 --vocab-size 39999"
    (row,) = rows(Case("large", f"{flags} {untied}", 1, 1))
    assert row.moment.startswith("backward of the output layer")
    assert abs(row.ratio - 1.0) < PER_CENT / 10, row


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_backward_frees_what_the_forward_left(case: Case) -> None:
    config = case.config
    for rank in range(config.parallel.pipeline_model_parallel_size):
        for stage in stages_of_rank(config.parallel, config.model.num_layers, rank):
            sizes = Sizes.in_training(config, device="cpu", stage=stage)
            plan = plan_stage(config.recompute, stage.num_layers, stage.number)
            forward, backward = stage_passages(config.model, plan, sizes)
            hidden = sizes.local_tokens * config.model.hidden_size * sizes.element_bytes
            # The input and the gradient of the output come from other ranks, and are freed here.
            received = hidden * ((not stage.is_first) + (not stage.is_last))
            assert forward.end + backward.end == -received
            assert forward.kept + backward.kept == 0


def run_of(flags: str) -> RunConfig:
    """Returns the config of a run with these flags on top of the benchmark's sizes."""
    return parse_args(f"{SIZES} --global-batch-size 16 {flags}".split()).config


def passage(most: int, end: int) -> Passage:
    """Returns a passage of which 1 byte in 2 is kept."""
    return Passage(most, end, end // 2, Moment("here", end // 4, 1))


@pytest.mark.parametrize("one", [passage(9, 4), passage(3, -8), passage(5, 0)])
@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_a_repeated_passage_is_that_many_in_a_row(one: Passage, number: int) -> None:
    repeated, row = one.times(number), joined(*[one] * number)
    assert (repeated.most, repeated.end, repeated.kept) == (row.most, row.end, row.kept)


@pytest.mark.parametrize("policy", ["*:none", "*:full/1", "*:full/2", "*:mlp", "*:full/1@host"])
def test_a_layer_more_adds_the_same_bytes_however_many_there_are(policy: str) -> None:
    peaks = [
        step_peak(
            run_of(f"--num-layers {number} --recompute-policy {policy}"),
            0,
            device="cuda",
            dp_cp_size=1,
        ).num_bytes
        for number in (4, 6, 8, 80, 82)
    ]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] == peaks[4] - peaks[3]


def test_the_fullest_rank_is_the_one_with_the_highest_peak() -> None:
    for flags in (
        "--pipeline-model-parallel-size 4 --num-layers 8",
        "--pipeline-model-parallel-size 4 --num-layers 8 --recompute-policy stage0/*:full/1",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2 --window-size 16,0 --window-attn-skip-freq 2",
    ):
        config = run_of(flags)
        every = [
            step_peak(config, rank, device="cpu", dp_cp_size=1)
            for rank in range(config.parallel.pipeline_model_parallel_size)
        ]
        fullest = fullest_step_peak(config, device="cpu", dp_cp_size=1)
        assert fullest.num_bytes == max(one.num_bytes for one in every), flags
        assert fullest in every


def test_a_longer_step_has_the_peak_of_one_in_which_the_schedule_has_repeated() -> None:
    for flags in (
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-size 4 --num-layers 16 --num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 4 --num-layers 8 --recompute-policy *:full/1 "
        "--num-microbatches-with-partial-activation-checkpoints 1",
    ):
        config = run_of(flags)
        size = config.parallel.pipeline_model_parallel_size
        for rank in range(size):
            peaks = {
                step_peak(
                    config, rank, device="cpu", dp_cp_size=1, num_microbatches=number
                ).num_bytes
                for number in (12 * size, 100 * size)
            }
            assert len(peaks) == 1, (flags, rank)
            assert len(order(size=size, rank=rank, num_microbatches=100 * size)) > 12 * size


def test_the_terms_hold_the_states_and_no_empty_part() -> None:
    config = run_of("--bf16 --use-distributed-optimizer")
    peak = step_peak(config, 0, device="cpu", dp_cp_size=2, dp_cp_rank=1)
    states = rank_states(config, 0, dp_cp_size=2, dp_cp_rank=1)
    by_name = {term.name: term.num_bytes for term in peak.terms}
    assert by_name["weights"] == states.weights and by_name["gradients"] == states.gradients
    assert by_name["main weights"] == states.masters
    assert by_name["optimizer states"] == states.optimizer
    assert min(by_name.values()) > 0
    assert {term.tag for term in peak.terms} <= {"exact", "bound", "estimate"}


def test_other_data_parallel_ranks_change_nothing_without_sharding() -> None:
    config = run_of("")
    alone = step_peak(config, 0, device="cpu", dp_cp_size=1)
    assert step_peak(config, 0, device="cpu", dp_cp_size=8) == alone
    other = replace(config, training=replace(config.training, micro_batch_size=4))
    assert step_peak(other, 0, device="cpu", dp_cp_size=1).num_bytes > alone.num_bytes


def test_every_layout_is_a_case_of_two_ranks() -> None:
    assert {case.name for case in TWO_RANKS if case.name in IN_EVERY_RUN}
    assert all(case.ranks == 2 for case in TWO_RANKS)
