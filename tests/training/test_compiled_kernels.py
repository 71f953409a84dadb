"""Compiled norms, activations, rotary embedding and dropout, in every layout and under policies.

Most of these tests run the functions as they are, without a compiler: which function runs where,
and what it keeps, is then known in milliseconds. The tests marked long compile them.
"""

import re
import sys
from functools import partial
from itertools import product

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.model.activations import squared_relu
from megatron_lite.parallel import compiled
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.training.build_trainer import with_known_compiler
from tests.memory import peak_cases as peaks
from tests.support.equality import differences, variant_config
from tests.support.models import Layout, loss_and_grads, tp_state, with_new_streams
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run
from tests.support.uncompiled import NEEDS_COMPILER, uncompiled_kernels

POLICIES = ("*:pointwise", "*:full", "*:pointwise+core_attn")
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
LLAMA = dict(
    normalization="RMSNorm",
    position_embedding_type="rope",
    group_query_attention=True,
    num_query_groups=2,
)
MANY_TOKENS = "--seq-length 512 --max-position-embeddings 512 --vocab-size 255"
LAYOUTS = [Layout(), Layout(2), Layout(2, True), Layout(cp=2)]
VARIANTS = ("qwen", "gpt2", "neox", "nemotron", "llama", "gemma", "cohere", "granite")


@pytest.fixture
def uncompiled(monkeypatch):
    """Makes every kernel the function itself."""
    uncompiled_kernels(monkeypatch)


def outcome(layout, variant, policy, dtype, kernels, rank, **overrides):
    with layout.state() as parallel:
        fresh = with_new_streams(parallel)
        config = variant_config(variant, **overrides)
        model = layout.model(config, fresh, dtype=dtype, plan=policy, kernels=kernels)
        return loss_and_grads(model, fresh, seq_length=16)


def differing(expected, actual, bound=0.0):
    """Returns the names whose bits, or whose values by more than the bound, differ."""
    return [name for name, error in differences(expected, actual).items() if error > bound]


def faults(rank, world_size, layout, variants, dtype, dropout):
    """Returns what a policy changes in the bits of a compiled run, by variant and policy, and where
    torch's operators give other values."""
    found, kernels = [], CompiledKernels()
    for variant in variants:
        run = partial(outcome, layout, variant, dtype=dtype, rank=rank, **dropout)
        expected = run("*:none", kernels=kernels)
        for policy in POLICIES:
            found += [
                f"{variant} {policy}: {name}"
                for name in differing(expected, run(policy, kernels=kernels))
            ]
        eager, bound = run("*:none", kernels=None), 1e-9 if dtype == torch.float64 else 0.02
        found += [f"{variant} eager: {name}" for name in differing(eager, expected, bound)]
    return found


@pytest.mark.runs(ci=3)
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "layout, variants",
    [(LAYOUTS[0], VARIANTS[:1]), *product(LAYOUTS, (VARIANTS[::2], VARIANTS[1::2]))],
)
def test_kernels_equal_torchs_operators_and_no_policy_changes_a_bit(layout, variants):
    """In float64 up to rounding, with dropout: the masks have the same bits."""
    dropout = DROPOUT if layout.cp == 1 else {}
    found = run_ranks(faults, layout.ranks, layout, variants, torch.float64, dropout)
    assert found == [[]] * layout.ranks


@pytest.mark.long
@NEEDS_COMPILER
def test_no_policy_changes_a_bit_of_a_compiled_run():
    """Of nine functions, the fewest of a model: each takes seconds to compile. Their values are
    those of torch's operators, up to the rounding of bf16 (seen: 0.4 %)."""
    assert faults(0, 1, Layout(), ["nemotron"], torch.bfloat16, {}) == []


@pytest.mark.runs(daily=2, ci=6)
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "model, policy, statistics",
    [
        ({}, "*:none", 5),
        ({}, "*:pointwise", 1),
        (dict(LLAMA, qk_layernorm=True), "*:none", None),
        (LLAMA, "*:pointwise", None),
        (dict(fp32_residual_connection=True, apply_layernorm_1p=True), "*:layernorm", None),
        (dict(fp32_residual_connection=True, normalization="RMSNorm"), "*:none", None),
    ],
)
def test_the_kept_bytes_are_predicted(tmp_path, model, policy, statistics):
    """In bf16 LayerNorm keeps float32 statistics, which torch's own kernel rounds to bf16. The
    norms of a float32 residual stream keep their weights in float32, and no bias. Those of queries
    and keys keep views of one storage."""
    predicted = {}
    for compiles in (False, True):
        run_to_end(
            tiny_run(
                metrics=tmp_path / str(compiles),
                train_iters=1,
                eval_iters=0,
                bf16=True,
                torch_compile=compiles,
                **model,
                recompute_policy=policy,
            )
        )
        (row,) = rows(tmp_path / str(compiles))
        assert row["activation_bytes_predicted"] == row["activation_bytes_measured"]
        predicted[compiles] = row["activation_bytes_predicted"]
    tokens, mean_and_deviation, wider = 16, 2, 2
    if statistics is not None:
        more = statistics * tokens * mean_and_deviation * wider
        assert predicted[True] - predicted[False] == more


@pytest.mark.weekly
@NEEDS_COMPILER
@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, f"{MANY_TOKENS} --bf16 {peaks.DROPOUT}"),
        (1, f"{MANY_TOKENS} {peaks.LLAMA} --bf16 {peaks.policy('*:full/1')}"),
        (1, f"{MANY_TOKENS} {peaks.LLAMA} {peaks.policy('*:pointwise')}"),
        (1, f"--bf16 {peaks.LLAMA}"),
        (2, f"{peaks.TP} {peaks.SEQUENCE} {MANY_TOKENS} {peaks.LLAMA} --bf16"),
    ],
)
def test_the_peak_of_compiled_kernels_is_predicted(ranks, flags):
    """Real kernels, in a real step. With many tokens a layer decides, else the loss."""
    for row in peaks.rows(peaks.Case(flags, f"{flags} --torch-compile", ranks)):
        assert 0.95 < row.ratio < 1.05, row


@pytest.mark.parametrize("lacks", ["compiler", "headers"])
def test_a_run_without_a_compiler_ends_with_what_it_lacks_or_goes_on_without(
    lacks, monkeypatch, tmp_path
):
    if lacks == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        message = "needs a C++ compiler, and there is no"
    else:
        monkeypatch.setenv("CXX", sys.executable)  # a program that there is
        monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: str(tmp_path))
        message = "has no Python.h: install them"
    asked = tiny_run(torch_compile=True)
    derived = tiny_run()
    with tp_state(1) as parallel:
        with pytest.raises(InputError, match=f"^--torch-compile .*{re.escape(message)}"):
            with_known_compiler(asked, parallel)
        assert with_known_compiler(derived, parallel) == (
            derived,
            "the kernels between matmuls are made by torch's own operators: the default on cpu",
        )
        monkeypatch.setattr(RunConfig, "uses_compiler", lambda config, device: True)  # as on CUDA
        config, line = with_known_compiler(derived, parallel)
    assert config.training.torch_compile is False
    assert "torch's own operators: torch's compiler" in line and message in line


def test_a_kernel_that_does_not_compile_names_the_function_its_shapes_and_the_flag(monkeypatch):
    def fails(*args):
        raise RuntimeError("no registers\nand more")

    monkeypatch.setattr(compiled, "_compiled", fails)
    told = r"failed on squared_relu of \[4, 5\] \(no registers\): --no-torch-compile leaves it out"
    with pytest.raises(InputError, match=told):
        CompiledKernels()(squared_relu, torch.randn(4, 5))


def test_no_measurement_chooses_a_kernel_whatever_the_environment_says(monkeypatch):
    import torch._inductor.config as settings

    seen = {}

    def compile_graph(graph, operands):
        seen.update({name: getattr(settings, name) for name in asked})
        return graph

    asked = {"max_autotune": True, "coordinate_descent_tuning": True, "triton.multi_kernel": 1}
    monkeypatch.setattr(compiled, "inductor_compile", lambda: compile_graph)
    with settings.patch(asked):
        CompiledKernels()(torch.sin, torch.ones(3))
    assert seen == dict.fromkeys(asked, 0)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch keeps dtypes equal")
def test_a_kernel_reads_a_parameter_whose_gradient_has_another_dtype():
    """As in an evaluation after a step, whose bias has 16 bits and a float32 sum of gradients."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.grad_dtype = None
    weight.grad = torch.zeros(8)
    rows = torch.ones(3, 8, dtype=torch.bfloat16)
    assert torch.equal(CompiledKernels()(torch.add, rows, weight), rows + 1.0)


@pytest.mark.usefixtures("uncompiled")
def test_shapes_that_vary_do_not_compile_without_end():
    kernels = CompiledKernels()
    for count in (*range(1, 30), *range(1, 30)):
        x = torch.randn(count, 5)
        torch.testing.assert_close(kernels(squared_relu, x), squared_relu(x.clone()))
    assert kernels.num_graphs == compiled.MOST_SHAPES


@pytest.mark.usefixtures("uncompiled")
def test_layers_micro_batches_and_evaluations_share_their_graphs(capsys):
    def num_graphs(num_layers, num_microbatches):
        trainer = run_to_end(
            tiny_run(
                num_layers=num_layers,
                global_batch_size=num_microbatches,
                train_iters=2,
                eval_interval=1,
                torch_compile=True,
            )
        )
        kernels = next(iter(trainer.model)).decoder.context.kernels
        assert kernels is not None
        return kernels.num_graphs

    few = num_graphs(1, 2)
    assert num_graphs(3, 4) == few <= 20
    assert "kernels were compiled in" in capsys.readouterr().out


def test_the_device_decides_unless_a_flag_does():
    for flags, on_cpu, on_cuda in (
        ({}, False, True),
        (dict(torch_compile=True), True, True),
        (dict(torch_compile=False), False, False),
    ):
        config = tiny_run(**flags)
        assert [config.uses_compiler(device) for device in ("cpu", "cuda")] == [on_cpu, on_cuda]
