"""Weight gradients summed by apex's kernel: right in every layout, at every precision, for tied
weights, and said so."""

import contextlib
import io
from collections import Counter

import pytest
import torch

from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel.apex import weight_gradient_kernel
from megatron_lite.parallel.weight_gradient import accumulate_with_
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.support import apex, cuda_addmm
from tests.support.equality import difference, variant_config
from tests.support.layouts import LAYOUTS
from tests.support.models import build_tiny_model, sample_tokens, tp_state, with_new_streams
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run
from tests.support.torch_features import NEEDS_GRAD_DTYPE

KERNEL = "wgrad_gemm_accum_fp32"
EPSILON = {
    torch.float32: 1e-6,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}


@pytest.fixture
def calls(monkeypatch):
    return apex.install(monkeypatch)


def kernel():
    found = weight_gradient_kernel().value
    return found


def matmul_weights(model):
    """Of linear layers, and the tied output weight."""
    weights = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }
    return (
        weights
        if model.output_layer is not None
        else {
            **weights,
            "embedding.word_embeddings.weight": dict(model.named_parameters())[
                "embedding.word_embeddings.weight"
            ],
        }
    )


def summed(
    name,
    world_size,
    *,
    fused,
    function="apex",
    dtype,
    sequence_parallel=False,
    policy="*:none",
    micro_batches=3,
    layout=None,
    tp_size=None,
):
    """This rank's gradients after some micro-batches, of a model with dropout."""
    config = variant_config(name, hidden_dropout=0.1)
    with tp_state(world_size if tp_size is None else tp_size) as parallel:
        parallel = with_new_streams(parallel)
        model = build_tiny_model(
            config, parallel, sequence_parallel=sequence_parallel, dtype=dtype, plan=policy
        )
        buffer = GradBuffer(dict(model.named_parameters()), parallel, layout)
        if fused:
            accumulate_with_(
                kernel() if function == "apex" else None,
                [(weight, buffer.grads[key]) for key, weight in matmul_weights(model).items()],
            )
        for _ in range(2):  # what the first step leaves must not count in the second
            buffer.forget()
            for number in range(micro_batches):
                if number == micro_batches - 1:
                    buffer.sync_next_backward()
                model.loss(*sample_tokens(10 * parallel.dp_cp_rank + number)).mean().backward()
            buffer.reduce_()
        return {key: grad.clone() for key, grad in buffer.grads.items()}


def is_by_kernel(key, name):
    return key.endswith("weight") and (
        "linear" in key or "output_layer" in key or (name == "gpt2" and "word_embed" in key)
    )


@pytest.mark.runs
@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    ("name", "policy"), [("gpt2", "*:none"), ("llama", "*:full"), ("gpt2", "*:pointwise+core_attn")]
)
def test_overlap_sends_what_the_kernel_has_written(calls, name, policy):
    """Sums of two ranks are the same in every order, so that no bit may differ."""
    layouts = ("replicated", "overlap", "zero1, overlap")

    def work(rank, world_size):
        return [
            summed(
                name,
                world_size,
                fused=True,
                dtype=torch.bfloat16,
                policy=policy,
                layout=LAYOUTS[layout],
                tp_size=1,
            )
            for layout in layouts
        ]

    first, second = run_ranks(work, 2, detail=False)
    for key, grad in first[0].items():
        assert torch.equal(grad, first[1][key]) and torch.equal(grad, second[1][key]), key
        # Of each element one rank has the sum, the other its own gradient.
        assert ((first[2][key] == grad) | (second[2][key] == grad)).all(), key


def log_of(config):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_to_end(config)
    return out.getvalue()


def said(text):
    lines = [line for line in text.splitlines() if line.startswith("weight gradients")]
    assert len(lines) == 1, lines
    return lines[0]


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    ("function", "training", "num_calls", "expected"),
    [
        ("apex", dict(bf16=True), 9, "NVIDIA apex's kernel"),
        ("apex", {}, 9, "NVIDIA apex's kernel"),
        ("apex", dict(fp16=True, loss_chunk_size=8), 10, "NVIDIA apex's kernel"),
        (
            "apex",
            dict(bf16=True, gradient_accumulation_fusion=False),
            0,
            "autograd after rounding them to 16 bits, because of --no-gradient-accumulation-fusion",
        ),
        ("addmm of CUDA", dict(bf16=True), 9, "torch's addmm"),
        ("", {}, 0, "torch's addmm"),
        (
            "",
            dict(bf16=True),
            0,
            "the layer's backward after rounding them to 16 bits, because NVIDIA apex has kernels "
            "for cuda and this run is on cpu",
        ),
    ],
)
def test_a_run_uses_the_kernel_where_it_may_and_says_so(
    monkeypatch, function, training, num_calls, expected
):
    installs = {"apex": apex.install, "addmm of CUDA": cuda_addmm.install}
    calls = installs[function](monkeypatch) if function else Counter()
    log = log_of(tiny_run(**dict(train_iters=1, eval_iters=0, **training)))
    count = calls["first"] + calls["later"] if function == "addmm of CUDA" else calls[KERNEL]
    assert count == 4 * num_calls  # micro-batches
    assert said(log) == f"weight gradients are summed in float32: 9 weights by {expected}"


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, True)])
@pytest.mark.parametrize("function", [None, "apex"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_GRAD_DTYPE)]
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.usefixtures("calls")
def test_a_kernel_gives_the_gradients_of_autograd(
    name, function, tp_size, sequence_parallel, dtype
):
    """By addmm one micro-batch has the same bits; the sum of several is rounded in another order.

    In 16 bits that is so for the tied weight alone, to which two parts of the graph add.
    """

    def work(rank, world_size):
        for micro_batches in (1, 3):
            plain, fused = (
                summed(
                    name,
                    world_size,
                    fused=fused,
                    function=function,
                    dtype=dtype,
                    sequence_parallel=sequence_parallel,
                    micro_batches=micro_batches,
                )
                for fused in (False, True)
            )
            for key, grad in plain.items():
                exact = micro_batches == 1 and function is None
                if exact or not is_by_kernel(key, name):
                    assert torch.equal(grad, fused[key]), key
                else:
                    assert difference(grad, fused[key]) < EPSILON[dtype], key

    if tp_size == 1:
        work(0, 1)
    else:
        run_ranks(work, tp_size)
