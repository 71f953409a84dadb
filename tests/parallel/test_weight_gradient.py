"""Weight gradients summed by apex's kernel: right in every layout, at every precision, for tied
weights, and said so. Which apex is installed and what of it can be used: nothing here may crash or
be silent."""

import contextlib
import importlib
import io
import sys
from collections import Counter

import pytest
import torch

from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel.weight_gradient import accumulate_with_
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_lite.training.apex_kernels import weight_gradient_kernel
from tests.support import apex, cuda_addmm
from tests.support.equality import difference, variant_config
from tests.support.layouts import LAYOUTS
from tests.support.models import Layout, sample_tokens, with_new_streams
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
    return weight_gradient_kernel()[0]


def matmul_weights(model):
    """Of linear layers, and the tied output weight."""
    weights = {
        f"{name}.weight": module.weight
        for name, module in model.named_modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }
    if model.output_layer is None:
        weights["embedding.word_embeddings.weight"] = model.embedding.word_embeddings.weight
    return weights


def summed(
    name,
    place,
    *,
    fused,
    dtype,
    function="apex",
    policy="*:none",
    micro_batches=3,
    layout=None,
    sums_in="fp32",
):
    """This rank's gradients after some micro-batches, of a model with dropout."""
    config = variant_config(name, hidden_dropout=0.1)
    with place.state() as parallel:
        parallel = with_new_streams(parallel)
        model = place.model(config, parallel, dtype=dtype, plan=policy)
        buffer = GradBuffer(dict(model.named_parameters()), parallel, layout, sums_in)
        if fused:
            for key, weight in matmul_weights(model).items():
                found = kernel() if function == "apex" else None
                accumulate_with_(found, weight, buffer.grads[key])
        for _ in range(2):  # what the first step leaves must not count in the second
            buffer.forget()
            for number in range(micro_batches):
                if number == micro_batches - 1:
                    buffer.sync_next_backward()
                model(*sample_tokens(10 * parallel.dp_cp_rank + number)).mean().backward()
            buffer.reduce_()
        return {key: grad.clone() for key, grad in buffer.grads.items()}


@pytest.mark.runs
@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    "name, policy", [("gpt2", "*:none"), ("llama", "*:full"), ("gpt2", "*:pointwise+core_attn")]
)
def test_overlap_sends_what_the_kernel_has_written(calls, name, policy):
    """Sums of two ranks are the same in every order, so that no bit may differ."""
    layouts = ("replicated", "overlap", "zero1, overlap")

    def work(rank, world_size):
        return [
            summed(
                name, Layout(), layout=LAYOUTS[one], fused=True, dtype=torch.bfloat16, policy=policy
            )
            for one in layouts
        ]

    first, second = run_ranks(work, 2, detail=False)
    for key, grad in first[0].items():
        assert torch.equal(grad, first[1][key]) and torch.equal(grad, second[1][key]), key
        # Of each element one rank has the sum, the other its own gradient.
        assert ((first[2][key] == grad) | (second[2][key] == grad)).all(), key


def said(**training):
    """Returns what a run says of its weight gradients."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_to_end(tiny_run(train_iters=1, eval_iters=0, **training))
    lines = out.getvalue().splitlines()
    (line,) = (line for line in lines if line.startswith("weight gradients"))
    return line


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    "function, training, num_calls, expected",
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
    line = said(**training)
    count = calls["first"] + calls["later"] if function == "addmm of CUDA" else calls[KERNEL]
    assert count == 4 * num_calls  # micro-batches
    assert line == f"weight gradients are summed in float32: 9 weights by {expected}"


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize("place", [Layout(), Layout(2, True)])
@pytest.mark.parametrize("function", [None, "apex"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_GRAD_DTYPE)]
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.usefixtures("calls")
def test_a_kernel_gives_the_gradients_of_autograd(name, function, place, dtype):
    """By addmm one micro-batch has the same bits; the sum of several is rounded in another order.

    In 16 bits that is so for the tied weight alone, to which two parts of the graph add.
    """

    def work(rank, world_size):
        for micro_batches in (1, 3):
            plain, fused = (
                summed(
                    name,
                    place,
                    fused=fused,
                    function=function,
                    dtype=dtype,
                    micro_batches=micro_batches,
                )
                for fused in (False, True)
            )
            for key, grad in plain.items():
                by_kernel = key.endswith("weight") and (
                    "linear" in key
                    or "output_layer" in key
                    or (name == "gpt2" and "word_embed" in key)
                )
                if (micro_batches == 1 and function is None) or not by_kernel:
                    assert torch.equal(grad, fused[key]), key
                else:
                    assert difference(grad, fused[key]) < EPSILON[dtype], key

    run_ranks(work, place.ranks)


@NEEDS_GRAD_DTYPE
@pytest.mark.usefixtures("calls")
def test_a_sum_of_16_bits_is_rounded_at_each_addition():
    """By the product itself, which needs no tensor of the gradient, and no kernel of apex."""
    for micro_batches in (1, 3):
        settings = dict(dtype=torch.bfloat16, micro_batches=micro_batches)
        wide = summed("llama", Layout(), fused=False, **settings)
        narrow = summed("llama", Layout(), fused=True, sums_in="bf16", **settings)
        for key, grad in wide.items():
            assert narrow[key].dtype == torch.bfloat16
            if micro_batches == 1:
                assert torch.equal(narrow[key].float(), grad), key
            assert difference(narrow[key].float(), grad) < micro_batches * EPSILON[torch.bfloat16]
    line = said(
        bf16=True,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        main_grads_dtype="bf16",
    )
    assert line == "weight gradients are summed in bfloat16: 9 weights by torch's addmm"


EXTENSION = "fused_weight_gradient_mlp_cuda"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes modules (by their dotted names) that can be imported, each folder a package. A run on
    this CPU may use what they hold, as it would on a GPU."""
    apex.has_kernels_for(monkeypatch, "cpu")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(modules):
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in tmp_path.rglob("*"):
            if folder.is_dir():
                (folder / "__init__.py").touch()
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", EXTENSION):
            del sys.modules[name]


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    "init", ["from pyramid_mailer.interfaces import IMailer", "raise SystemExit(3)", "x = 1"]
)
def test_the_toolkit_of_that_name_on_pypi_is_never_imported(packages, init):
    packages({"apex.lib.libapex": "groupfinder = 1", "apex.views": "", "apex.__init__": init})
    kernel, reason = weight_gradient_kernel()
    assert kernel is None and "apex is not installed with its CUDA extensions" in reason
    assert reason in said(bf16=True)
    assert "apex" not in sys.modules


def test_an_extension_inside_the_package_is_found(packages):
    packages(
        {
            "apex.optimizers.fused_adam": "class FusedAdam: pass",
            f"apex._extensions.{EXTENSION}": f"{KERNEL} = 7",
        }
    )
    assert kernel() == 7


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize(
    "text, reason",
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "fails (ImportError: libcudart.so.12: cannot open",
        ),
        (
            "raise OSError('undefined symbol:\\n _ZN2at')",
            "fails (OSError: undefined symbol: _ZN2at)",
        ),
        (
            "wgrad_gemm_accum_fp32 = None",
            "has no wgrad_gemm_accum_fp32: it is of another release of apex",
        ),
    ],
)
def test_an_extension_that_cannot_be_used_is_a_reason_in_the_log_and_no_crash(
    packages, text, reason
):
    packages({EXTENSION: text})
    assert reason in weight_gradient_kernel()[1]
    line = said(bf16=True)
    assert ": 9 weights by the layer's backward" in line and reason in line
