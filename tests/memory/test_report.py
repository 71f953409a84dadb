"""The explanation of a plan: its figures add up, agree with the paper's, and each note is made
where it holds, and only there."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from arguments import parse_args
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import count, flops, percent, size
from megatron_lite.description.operations import Collective
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.explain.prices import best_unit, flags_of, short_name, uniform_peaks
from megatron_lite.memory.explain.recompute_report import Report, explain, likely_device
from megatron_lite.memory.explain.report_text import WIDTH, report_text
from megatron_lite.memory.predict.flops import hardware_flops, replay_flops, step_flops
from megatron_lite.memory.predict.kept_tensors import activation_bytes, host_bytes
from megatron_lite.memory.predict.peak import peak
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.memory.predict.traffic import Traffic
from megatron_lite.recompute.schedule import plan_stage
from tests.support.pairs import thirds
from tests.support.traffic import plan_collectives

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
MIB = 2**20

POLICIES = [
    "",
    FULL + "uniform",
    FULL + "uniform --recompute-num-layers 2",
    FULL + "uniform --recompute-num-layers 9",
    FULL + "block --recompute-num-layers 3",
    FULL + "block --recompute-num-layers 9",
    SELECTIVE + "core_attn",
    SELECTIVE + "mlp layernorm",
    SELECTIVE + "pointwise",
    SELECTIVE + "core_attn pointwise",
    "--recompute-policy 0-1:full/2;2:core_attn+pointwise;3:mlp",
    "--recompute-policy 4:none;*:full/2",
    "--recompute-policy every-2:full",
    "--recompute-policy every-2:mlp@host;every-2+1:full@host",
    "--recompute-policy 2:none@host;*:full/2",
    (
        "--recompute-policy "
        "0-1:ops(matmul,attention);2-3:ops(matmul/2,collective,max,aten.baddbmm.default);4:full"
    ),
    "--recompute-policy 0-1:full/2@host;2:core_attn+pointwise@host;3:none@host;*:ops(matmul)@host",
    "--recompute-policy *:full@host --contiguous-saved-activations",
    FULL + "uniform --recompute-num-layers 2 --no-recompute-tail-skip",
    SELECTIVE + "mlp core_attn --recompute-verify",
]
SPLIT = [
    policy + " --distribute-saved-activations" for policy in POLICIES if policy.startswith(FULL)
]
SPLIT += [
    "--recompute-policy 0-2:full/2@split;3:none;*:full@split",
    "--recompute-policy 0-2:full/2@split+host;3:full@split;*:none --contiguous-saved-activations",
]
LAYOUTS = {
    "": POLICIES,
    "--tensor-model-parallel-size 2 ": POLICIES + SPLIT,
    "--tensor-model-parallel-size 2 --sequence-parallel ": POLICIES,
}
CASES = [
    (model + layout, policy)
    for model in (TINY, LLAMA)
    for layout, policies in LAYOUTS.items()
    for policy in policies
]
CASES += [
    (run, policy)
    for run in (
        LLAMA + "--context-parallel-size 3 ",
        TINY + UNFUSED + "--context-parallel-size 2 ",
        LLAMA
        + "--tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type allgather ",
    )
    for policy in POLICIES
]


def config_of(words: str) -> RunConfig:
    return parse_args(words.split()).config


@functools.cache
@functools.cache
def report_of(words: str, device: str = "cuda") -> Report:
    return explain(config_of(words), device)


def topics(report: Report) -> list[str]:
    return [note.topic for note in report.notes]


def note(report: Report, topic: str) -> str:
    (text,) = [note.text for note in report.notes if note.topic == topic]
    return text


@pytest.mark.parametrize("policy", ["", "--recompute-policy 0-1:full/2;*:pointwise"])
def test_fp16_is_as_large_as_bf16(policy: str) -> None:
    half, bf16 = (
        report_text(report_of(LLAMA.replace("--bf16", precision) + policy, "cpu"))
        for precision in ("--fp16", "--bf16")
    )
    assert "V 128, fp16" in half and half.replace("fp16", "bf16") == bf16


@pytest.mark.parametrize(
    ("run", "policy", "device"),
    thirds(
        (*case, device)
        for case, device in zip(CASES, itertools.cycle(("cpu", "cuda")), strict=False)
    ),
)
def test_the_parts_add_up_to_the_whole(run: str, policy: str, device: str) -> None:
    report = report_of(run + policy, device)
    config, sizes, plan = report.config, report.sizes, plan_stage(report.config.recompute, 5)
    assert sorted(layer for one in report.layer_groups for layer in one.layers) == [0, 1, 2, 3, 4]
    parts = report.embedding.kept_bytes + report.rotary_tables.kept_bytes + report.head.kept_bytes
    assert parts + sum(
        one.count * one.kept_bytes for one in report.layer_groups
    ) == activation_bytes(config.model, plan, sizes)
    moved = sum(one.count * tensor.num_bytes for one in report.layer_groups for tensor in one.moved)
    assert moved == report.own.host_bytes == host_bytes(config.model, plan, sizes)
    again = replay_flops(config.model, plan, batch=3, seq_length=12, device=device)
    assert (
        sizes.num_ranks * sum(one.count * one.replay_flops for one in report.layer_groups) == again
    )
    sent = report.embedding.traffic
    for one in report.layer_groups:
        for _ in range(one.count):
            sent += one.traffic
    # The order differs: the layers of a group need not be neighbours.
    sent, expected = sent + report.head.traffic, plan_collectives(config.model, plan, sizes)
    for phase in ("forward", "backward", "replay"):
        assert Counter(getattr(sent, phase)) == Counter(getattr(expected, phase))


@pytest.mark.parametrize(("run", "policy"), thirds(CASES))
def test_the_text_fits_its_columns_and_has_the_exact_totals(run: str, policy: str) -> None:
    report = report_of(run + policy, "cpu")
    lines = report_text(report).split("\n")
    assert max(map(len, lines)) <= WIDTH == 100
    narrow = report_text(report, 80).split("\n")
    assert max(map(len, narrow)) <= 80 and all(line == line.rstrip() for line in narrow)
    assert all(line == line.rstrip() for line in lines) and "\n\n\n" not in "\n".join(lines)
    (total,) = [line for line in lines if line.startswith("  kept in all ")]
    assert total.split()[4] == f"{report.own.kept_bytes:,}"
    (held,) = [line for line in lines if line.startswith("  held at the peak ")]
    assert held.split()[5] == f"{report.own.peak.held_bytes:,}"
    marked = [line for line in lines if line.startswith("> ")]
    (own,) = marked
    assert own[2:].startswith(short_name(report.config.recompute))


@pytest.mark.parametrize("policy", POLICIES + SPLIT)
def test_the_flags_of_a_policy_give_it_again(policy: str) -> None:
    run = TINY + "--tensor-model-parallel-size 2 "
    recompute = config_of(run + policy).recompute
    assert (
        parse_args([*run.split(), *shlex.split(flags_of(recompute))]).config.recompute == recompute
    )


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        ("", [((0, 1, 2, 3, 4), 5)]),
        (FULL + "uniform --recompute-num-layers 2", [((0, 1, 2, 3), 2), ((4,), 1)]),
        (FULL + "block --recompute-num-layers 2", [((0, 1), 2), ((2, 3, 4), 3)]),
        (SELECTIVE + "mlp", [((0, 1, 2, 3, 4), 5)]),
        ("--recompute-policy every-2:full", [((0, 2, 4), 3), ((1, 3), 2)]),
        ("--recompute-policy 2:none;*:full/2", [((0, 1, 3, 4), 2), ((2,), 1)]),
    ],
)
def test_layers_that_are_treated_alike_are_one_group(
    policy: str, groups: list[tuple[tuple[int, ...], int]]
) -> None:
    assert [(one.layers, one.count) for one in report_of(TINY + policy).layer_groups] == groups


NORMS, MLP = ("input_layernorm", "pre_mlp_layernorm"), ("linear_fc1", "activation")
WHOLE_LAYER = (
    "input_layernorm",
    "linear_qkv",
    "core_attention",
    "linear_proj",
    "attention dropout",
    "pre_mlp_layernorm",
    *MLP,
    "linear_fc2",
    "mlp dropout",
)
BETWEEN_MATMULS = ("attention dropout", "pre_mlp_layernorm", "activation", "mlp dropout")


@pytest.mark.parametrize(
    ("policy", "device", "rebuilt", "left_out"),
    [
        ("", "cpu", (), None),
        (FULL + "uniform", "cpu", WHOLE_LAYER, "linear_fc2"),
        (FULL + "uniform --recompute-num-layers 5", "cpu", WHOLE_LAYER, "the last linear_fc2"),
        (FULL + "uniform --no-recompute-tail-skip", "cpu", WHOLE_LAYER, None),
        (SELECTIVE + "core_attn", "cpu", ("core_attention",), "softmax x value"),
        # flash attention's context cannot be left out
        (SELECTIVE + "core_attn", "cuda", ("core_attention",), None),
        (
            SELECTIVE + "mlp core_attn",
            "cpu",
            ("core_attention", *MLP),
            "softmax x value and linear_fc2",
        ),
        (SELECTIVE + "mlp --recompute-verify", "cpu", (*MLP, "linear_fc2"), None),
        (SELECTIVE + "layernorm", "cpu", NORMS, None),
        (SELECTIVE + "activation", "cpu", ("activation",), None),
        (SELECTIVE + "dropout", "cpu", ("attention dropout", "mlp dropout"), None),
        (
            "--recompute-policy *:ops(matmul)",
            "cpu",
            ("input_layernorm", "core_attention", *BETWEEN_MATMULS),
            "linear_fc2",
        ),
        (
            "--recompute-policy *:ops(matmul/2,attention) --attention-dropout 0",
            "cuda",
            ("input_layernorm", "linear_proj", *BETWEEN_MATMULS),
            "linear_fc2",
        ),
        (
            "--recompute-policy *:ops(matmul,attention) --attention-dropout 0 --recompute-verify",
            "cuda",
            ("input_layernorm", *BETWEEN_MATMULS),
            None,
        ),
    ],
)
def test_what_runs_again_is_named(
    policy: str, device: str, rebuilt: tuple[str, ...], left_out: str | None
) -> None:
    run = report_of(TINY + policy, device).layer_groups[0]
    assert (run.rebuilt, run.left_out) == (rebuilt, left_out)


def test_a_unit_split_over_two_ranks_by_hand() -> None:
    """s b h = 36 x 32 elements of 4 bytes. A unit of 5 layers: 10 sums forward, and again but the
    last; its input gathered."""
    (run,) = report_of(
        TINY + "--tensor-model-parallel-size 2 " + FULL + "uniform --recompute-num-layers 5 "
        "--distribute-saved-activations",
        "cpu",
    ).layer_groups
    hidden, states = 36 * 32 * 4, 2 * 5056
    total, gather = Collective("all-reduce", hidden), Collective("all-gather", hidden)
    assert run.traffic == Traffic((total,) * 10, (total,) * 10, (gather, *(total,) * 9))
    assert {tensor.name: tensor.num_bytes for tensor in run.kept} == {
        "1/2 of the layer input": hidden // 2,
        "RNG states": states,
    }


SBH = 2048 * 4 * 6144
SCORES = 5 * 64 * 2048 * 2048 * 4 // 8  # 5 a s^2 b / t


@pytest.mark.parametrize(
    ("words", "formula", "per_layer"),
    [
        ("", "sbh(10 + 24/t + 5as/ht)", 13 * SBH + SCORES),
        ("--sequence-parallel ", "(sbh/t)(34 + 5as/h)", 34 * SBH // 8 + SCORES),
        (SELECTIVE + "core_attn", "sbh(10 + 24/t)", 13 * SBH),
        ("--sequence-parallel " + SELECTIVE + "core_attn", "34sbh/t", 34 * SBH // 8),
        (FULL + "uniform --recompute-num-layers 3", "2sbh", 2 * SBH),
        (FULL + "uniform --distribute-saved-activations", "2sbh/t", 2 * SBH // 8),
        ("--sequence-parallel " + FULL + "uniform", "2sbh/t", 2 * SBH // 8),
    ],
)
def test_in_the_papers_setting_the_papers_terms_are_its_formula(
    words: str, formula: str, per_layer: int
) -> None:
    report = report_of(GPT_22B + UNFUSED + words)
    compared = report.comparisons[-1]
    assert compared.paper == (formula, per_layer)
    assert compared.in_paper_bytes == per_layer
    assert report.unlike_the_paper == ()
    assert {tensor.name for tensor in compared.others} <= {
        "input norm statistics",
        "mlp norm statistics",
        "RNG states",
        "RNG states of core_attn",
    }


def test_regions_that_the_paper_does_not_know_have_no_formula() -> None:
    kept, rebuilt = report_of(GPT_22B + SELECTIVE + "layernorm").comparisons
    assert kept.paper is not None and rebuilt.paper is None


def test_what_makes_a_model_unlike_the_papers_is_named() -> None:
    assert report_of(LLAMA, "cpu").unlike_the_paper == (
        "flash attention, which keeps no scores",
        "no dropout of the scores",
        "no dropout of the residual",
        "swiglu",
        "f = 2.00 h",
    )
    assert report_of(TINY, "cpu").unlike_the_paper == ("4-byte activations",)


@pytest.mark.parametrize(
    "words",
    [
        TINY,
        GPT_22B,
        GPT_22B + "--sequence-parallel ",
        GPT_22B + FULL + "uniform --recompute-num-layers 7 --distribute-saved-activations",
    ],
)
def test_the_other_policies_are_priced_as_they_would_be_run(words: str) -> None:
    report = report_of(words)
    config, sizes = report.config, report.sizes
    rows = {policy.name: policy for policy in report.policies}
    assert len(rows) == len(report.policies) >= 6
    assert list(rows.values()) == sorted(rows.values(), key=lambda row: -row.whole_bytes)
    splits = sizes.tp_size > 1 and not sizes.sequence_parallel
    assert any("distributed" in name for name in rows) == splits
    for row in rows.values():
        training = replace(config.training, loss_chunk_size=row.loss_chunk_size)
        alone = replace(config, recompute=row.recompute, training=training)  # legal in this run
        plan = plan_stage(alone.recompute, config.model.num_layers)
        assert row.plan == plan
        own = Sizes.of(alone, device="cuda")
        assert row.kept_bytes == activation_bytes(config.model, plan, own)
        assert row.peak == peak(config.model, plan, own)
        whole = fullest_step_peak(alone, device="cuda", dp_cp_size=1)
        assert row.whole_bytes == whole.num_bytes
        facts: dict[str, Any] = dict(batch=sizes.micro_batch_size, seq_length=sizes.seq_length)
        assert row.replay_flops * sizes.tp_size == replay_flops(
            config.model, plan, **facts, device="cuda"
        )
        assert row.model_flops * sizes.tp_size == step_flops(
            config.model, **facts, padded_vocab_size=sizes.padded_vocab_size
        )
    assert sum(row.execution == report.own.execution for row in report.policies) == 1


def test_the_table_has_the_engines_own_policies_beside_megatrons() -> None:
    words = "this run with --loss-chunk-size 1024"
    names = [row.name for row in report_of(GPT_22B).policies]
    assert {"policy every-2:full", "policy *:full@host", "policy *:none@host", words} < set(names)
    on_cpu = [row.name for row in report_of(TINY, "cpu").policies]
    assert not any("@host" in name or name == words for name in on_cpu)


def test_the_logits_that_a_loss_in_chunks_computes_again_count_in_its_row() -> None:
    report = report_of(GPT_22B)
    (chunked,) = (row for row in report.policies if row.loss_chunk_size)
    config, sizes = report.config, report.sizes
    facts: dict[str, Any] = dict(
        batch=sizes.micro_batch_size,
        seq_length=sizes.seq_length,
        padded_vocab_size=sizes.padded_vocab_size,
        device="cuda",
    )
    plan = plan_stage(config.recompute, config.model.num_layers)
    more = hardware_flops(config.model, plan, loss_chunk_size=1024, **facts) - hardware_flops(
        config.model, plan, **facts
    )
    assert chunked.chunk_flops * sizes.tp_size == more > 0
    assert chunked.added_flops > report.own.added_flops == report.own.extra_flops


def test_the_best_unit_of_the_22b_model_is_longer_only_where_inputs_are_kept_whole() -> None:
    """About sqrt(c L / W) layers: c bytes of an input, W of a layer that was rebuilt."""
    assert best_unit(uniform_peaks(config_of(GPT_22B), "cuda", split=False)) == 3
    assert (
        best_unit(
            uniform_peaks(
                config_of(GPT_22B + UNFUSED + "--sequence-parallel "), "cuda", split=False
            )
        )
        == 1
    )
    assert best_unit(uniform_peaks(config_of(GPT_22B), "cuda", split=True)) == 1


# Notes


@pytest.mark.long
def test_a_unit_that_holds_more_than_the_best_is_told_so_with_the_ratio() -> None:
    words = GPT_22B + FULL + "uniform --recompute-num-layers "
    held = {count: report_of(words + str(count)).own.peak.held_bytes for count in (1, 3, 12)}
    assert topics(report_of(words + "3")) == []
    text = note(report_of(words + "12"), "unit")
    assert text.startswith(
        f"A unit of 12 holds {held[12] / held[3]:.2f}x what a unit of 3 would at the peak, "
        f"{size(held[12])} against {size(held[3])}"
    )
    assert "a unit of 3 would" in note(report_of(words + "1"), "unit")
    assert "A unit of 48 holds" in note(report_of(words + "99"), "unit")


def test_a_peak_that_hardly_drops_is_said_with_its_share() -> None:
    """One unit of all layers keeps 2sbh in all, and holds all of them in backward; the head's part
    alone is gone by then."""
    words = GPT_22B + FULL + "uniform --recompute-num-layers "
    report = report_of(words + "48")
    assert report.own.kept_bytes < report.without.kept_bytes // 50
    text = note(report, "peak")
    assert text == (
        f"The peak hardly drops: {size(report.own.peak.held_bytes)}, 99.0% of the "
        f"{size(report.without.peak.held_bytes)} without recomputation."
    )
    assert "peak" not in topics(report_of(words + "1"))


def test_states_of_random_streams_can_outweigh_what_a_small_region_frees() -> None:
    report = report_of(TINY + UNFUSED + "--attention-dropout 0 " + SELECTIVE + "core_attn", "cpu")
    assert report.own.kept_bytes - report.without.kept_bytes == 5 * (2 * 5056 - 3 * 4 * 12 * 12 * 4)
    assert note(report, "peak").startswith("The peak does not drop: ")
    assert "core_attn -" not in note(
        report_of(GPT_22B + UNFUSED + SELECTIVE + "core_attn"), "regions"
    )


def test_what_goes_to_the_host_is_named_and_on_a_cpu_so_is_that_it_frees_nothing() -> None:
    """s 12, b 3, h 32 in float32: 4608 bytes for each of 5 units."""
    run = TINY + "--recompute-policy *:full@host"
    assert note(report_of(run), "host").startswith(
        "@host copies 22.500 KiB to the host in forward and as much back"
    )
    assert (
        note(report_of(run, "cpu"), "host")
        == "On a CPU @host frees nothing: it copies 22.500 KiB within the same memory."
    )
    assert "host" not in topics(report_of(run.replace("@host", "")))


@pytest.mark.long
def test_distributed_inputs_are_compared_with_sequence_parallelism() -> None:
    words = GPT_22B + FULL + "uniform "
    text = note(report_of(words + "--distribute-saved-activations"), "distribute")
    assert f"frees {size(48 * 2 * SBH * 7 // 8)}, for one all-gather per unit" in text
    assert (
        f"{size(report_of(words + '--sequence-parallel').own.peak.held_bytes)} at the peak" in text
    )
    odd = words.replace("--seq-length 2048", "--seq-length 2047") + "--distribute-saved-activations"
    assert "--sequence-parallel" not in note(report_of(odd), "distribute")  # t does not divide s
    assert "distribute" not in topics(report_of(words))


@pytest.mark.parametrize(
    ("module", "freed"),
    [
        # two outputs of the norms, and the statistics of both
        ("layernorm", 2 * 2 * SBH + 2 * 8 * 2048 * 4),
        ("activation", 2 * 4 * SBH // 8),
        ("dropout", 2 * SBH - 2 * 16),
    ],
)
def test_what_a_region_frees_is_said(module: str, freed: int) -> None:
    assert note(report_of(GPT_22B + SELECTIVE + module), "regions") == (
        f"Freed in a layer, less what is kept to rebuild it: {module} {size(freed)}."
    )


@pytest.mark.long
def test_core_attention_is_called_moot_only_where_flash_attention_runs() -> None:
    words = GPT_22B + SELECTIVE + "core_attn "
    assert topics(report_of(words)) == ["regions", "core_attn", "peak"]
    assert topics(report_of(words + UNFUSED)) == ["regions"]
    # known from the flags alone
    assert topics(report_of(words + "--attention-dropout 0")) == ["warning", "regions", "peak"]
    # with dropout a CPU has no flash kernel, and a third is saved there
    for backend in ("auto", "flash"):
        report = report_of(f"{words} --attention-backend {backend}", "cpu")
        assert (
            topics(report) == ["regions"]
            and report.own.kept_bytes < 0.7 * report.without.kept_bytes
        )
        assert topics(report_of(f"{words} --attention-backend {backend}")) == [
            "regions",
            "core_attn",
            "peak",
        ]


def test_warnings_of_the_flags_are_notes_too() -> None:
    report = report_of(TINY + SELECTIVE + "mlp activation", "cpu")
    assert (
        note(report, "warning")
        == "--recompute-modules activation adds nothing to mlp, which it is a part of."
    )
    assert "activation" not in note(report, "regions")
    assert "is more than the 5 layers" in note(
        report_of(TINY + FULL + "block --recompute-num-layers 6", "cpu"), "warning"
    )


def test_a_head_larger_than_all_layers_is_pointed_out() -> None:
    wide = TINY.replace("--vocab-size 98", "--vocab-size 50000")
    for words, larger in ((wide, True), (TINY, False)):
        report = report_of(words)
        layers = sum(group.count * group.kept_bytes for group in report.layer_groups)
        assert (report.head.kept_bytes > layers) == larger == ("head" in topics(report))
    assert f"The head keeps {size(report_of(wide).head.kept_bytes)}, and" in note(
        report_of(wide), "head"
    )


def test_without_recomputation_the_most_effective_and_the_free_flags_are_named() -> None:
    report = report_of(GPT_22B)
    assert topics(report) == ["none", "free"]
    least = min(row.peak.held_bytes for row in report.policies if not row.host_bytes)
    assert (
        "--recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations"
        in note(report, "none")
    )
    assert f"{size(least)} instead of {size(report.own.kept_bytes)}" in note(report, "none")
    assert note(report, "free").startswith(
        "--recompute-granularity selective --recompute-modules layernorm activation dropout "
    )


def test_a_tail_that_runs_again_is_priced() -> None:
    """fc2 of every layer: 2 x tokens x h x 4h."""
    report = report_of(TINY + FULL + "uniform --no-recompute-tail-skip", "cpu")
    wasted = 5 * 2 * 36 * 32 * 128
    assert note(report, "tail") == (
        "With --no-recompute-tail-skip replays also run what nothing reads: "
        f"{percent(wasted / report.own.model_flops)} FLOPs."
    )
    assert "tail" not in topics(report_of(TINY + FULL + "uniform", "cpu"))


# Device and units


@pytest.mark.parametrize(
    ("backend", "visible", "devices", "expected"),
    [
        ("gloo", None, ["/dev/nvidia0"], "cpu"),
        ("nccl", None, [], "cuda"),
        ("auto", None, [], "cpu"),
        ("auto", None, ["/dev/nvidia0"], "cuda"),
        ("auto", "0,1", ["/dev/nvidia0"], "cuda"),
        ("auto", "", ["/dev/nvidia0"], "cpu"),
        ("auto", "-1", ["/dev/nvidia0"], "cpu"),
    ],
)
def test_the_device_is_the_one_that_training_would_take(
    backend: str,
    visible: str | None,
    devices: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("glob.glob", lambda pattern: devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert likely_device(backend) == expected


def test_units() -> None:
    assert [size(number) for number in (512, 3 * MIB // 2, 1024 * MIB - 1, 1024 * MIB)] == [
        "0.500 KiB",
        "1.500 MiB",
        "1,024.000 MiB",
        "1.000 GiB",
    ]
    assert [flops(number) for number in (1500, 2 * 10**9, 3 * 10**12, 5 * 10**15)] == [
        "0.002 MFLOP",
        "2.000 GFLOP",
        "3.000 TFLOP",
        "5.000 PFLOP",
    ]
    assert percent(0.2254) == "+22.5%"
    assert [count(number) for number in (999_999, 10**6, 8_030_261_248)] == [
        "999,999",
        "1.000 million",
        "8.030 billion",
    ]


@pytest.mark.parametrize(
    ("layout", "parameters"),
    [
        ("", "22.068 billion; 2.772 billion on each rank"),
        ("--tensor-model-parallel-size 1", "22.068 billion"),
        (
            "--pipeline-model-parallel-size 24 --num-virtual-stages-per-pipeline-rank 2",
            # 2 (12 h^2 + 7 h) / 8 + 12 h, and embeddings (51200 / 8 + 2048) h
            "22.068 billion; 165.235 million on pipeline rank 0",
        ),
    ],
)
def test_the_text_has_the_parameters_of_the_model_and_of_a_rank(
    layout: str, parameters: str
) -> None:
    report = report_of(GPT_22B.replace("50303", "50256") + layout)
    assert max(map(len, report_text(report, 80).split("\n"))) <= 80
    lines = report_text(report).split("\n")
    assert f"    parameters  {parameters}" in lines
    # 24 ranks are more than are shown
    assert max(map(len, lines)) <= WIDTH and all(line == line.rstrip() for line in lines)


def test_sizes_are_those_of_the_run() -> None:
    assert report_of(GPT_22B).sizes == Sizes(
        micro_batch_size=4,
        seq_length=2048,
        padded_vocab_size=51200,
        tp_size=8,
        element_bytes=2,
        device="cuda",
    )


def test_the_tables_of_virtual_stages_are_one_row() -> None:
    """Each of the two stages of a rank has its own."""
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    rest = "--max-position-embeddings 32 --micro-batch-size 2 --vocab-size 101"
    rope = "--position-embedding-type rope --normalization RMSNorm --swiglu"
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    words = f"{sizes} {rest} {rope} {stages} --global-batch-size 8 --mock-data"
    lines = report_text(explain(parse_args(words.split()).config, "cpu")).splitlines()
    named = [line.split() for line in lines if line.startswith("  rotary tables")]
    one_stage = 32 * 16 * 4  # s x d in float32, each of sine and cosine
    assert [row[2:] for row in named[:2]] == [
        ["which", "all", "layers", "share"],
        ["0.008", f"{2 * 2 * one_stage:,}"],
    ]
