"""What must hold on a GPU as on the CPU. Each test takes a `device`, so that the CPU run of the
suite tries the test itself."""

import io
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import product

import torch

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.model.attention import CoreAttention
from megatron_lite.model.gpt import ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.rng import TENSOR_PARALLEL, RngStreams
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.batches import MicroBatch
from megatron_lite.training.step import StageRunner, train_step
from tests.support.equality import variant_config
from tests.support.models import Outcome, build_tiny_model, sample_tokens, tiny_config
from tests.support.runs import rows, run_to_end, tiny_run
from tests.support.saves import same, state_of

CPU = torch.device("cpu")
ARCHITECTURES = ("gpt2", "llama", "qwen")


def on(device):
    """The state of a run of one rank on that device."""
    return ParallelState(device=device, rng=RngStreams(device, seed=7))


def batch_on(device):
    tokens, labels = sample_tokens()
    return MicroBatch(tokens.to(device), labels.to(device))


def gradients(config, device, dtype):
    """Loss and gradients of one batch, on the CPU in float64."""
    model = build_tiny_model(config, on(device), dtype=dtype)
    batch = batch_on(device)
    loss = model(batch.tokens, batch.labels).mean()
    loss.backward()
    return Outcome(
        loss.detach().cpu().double(),
        {
            name: parameter.grad.cpu().double()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    )


def relative_error(ours, reference):
    """Norm of the difference / norm of the reference."""
    return ((ours - reference).norm() / reference.norm()).item()


# --- the model ---


def test_gradients_stay_near_float64(device):
    """Float32 rounds at 1e-7; three layers and sums over 36 tokens leave a few times 1e-6. Some
    gradients are truly 0. bf16 rounds at 4e-3 and fp16 at 5e-4: each weight gradient may be off by
    a few of those, the loss by one."""
    for name in ARCHITECTURES:
        config = variant_config(name)
        reference = gradients(config, CPU, torch.float64)
        for dtype, loss, weight in (
            (torch.float32, 2.3e-6, 1e-4),
            (torch.bfloat16, 1e-2, 0.1),
            (torch.float16, 2e-3, 0.02),
        ):
            result = gradients(config, device, dtype)
            assert relative_error(result.loss, reference.loss) < loss, (name, dtype)
            assert result.grads.keys() == reference.grads.keys()
            for parameter, grad in reference.grads.items():
                if dtype == torch.float32 or (parameter.endswith("weight") and grad.dim() > 1):
                    error = (result.grads[parameter] - grad).norm()
                    assert error < weight * grad.norm() + 1e-6, (name, dtype, parameter)


def attention_and_gradients(backend, device, dtype, **settings):
    """Output and input gradients of [s 24, b 2, 4 heads over 2 groups, d 64]."""
    config = tiny_config(
        attention_backend=backend, num_attention_heads=4, kv_channels=64, **settings
    )
    generator = torch.Generator().manual_seed(5)
    inputs = [
        torch.randn(24, 2, heads, 64, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weights = torch.randn(24, 2, 256, generator=generator).to(device, dtype)
    output = CoreAttention(config, RngStreams(device, seed=1), layer=0)(*inputs)
    return [output, *torch.autograd.grad(output, inputs, weights)]


def test_all_kernels_of_attention_agree(device):
    """Each is compared with float64, so that none may hide behind another's rounding. On CUDA
    FlashAttention knows windows; the kernel for float32 has masks padded to 32 elements."""
    fused = ("fused",) if device.type == "cuda" else ()
    dtypes = (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)
    for window, in_fp32 in product(({}, dict(window_size=(5, 0))), (False, True)):
        settings = dict(window, attention_softmax_in_fp32=in_fp32)
        reference = attention_and_gradients("unfused", CPU, torch.float64, **settings)
        for dtype, tolerance in dtypes:
            backends = ("auto", "flash", "unfused", *fused * (dtype == torch.bfloat16))
            for backend in backends:
                results = attention_and_gradients(backend, device, dtype, **settings)
                for ours, exact in zip(results, reference, strict=True):
                    error = relative_error(ours.detach().cpu().double(), exact.detach())
                    assert error < tolerance and ours.dtype == dtype, (backend, dtype, settings)


# --- random-number streams ---


def test_streams_of_a_gpu_leave_the_cpus_generator_alone(cuda):
    before = torch.get_rng_state()
    rng = RngStreams(cuda, seed=3)
    with rng.fork(TENSOR_PARALLEL):
        torch.rand(5, device=cuda)
    rng.restore(rng.snapshot())
    assert torch.equal(torch.get_rng_state(), before)


# --- the training step ---


def small_step(device, dtype=torch.float32, loss_scale=None):
    parallel = on(device)
    model = build_tiny_model(
        tiny_config(hidden_dropout=0.1, attention_dropout=0.1), parallel, dtype=dtype
    )
    return model, Optimizer(model, OptimizerConfig(), parallel, loss_scale=loss_scale), parallel


def one_step(model, optimizer, parallel, batch):
    return train_step(
        StageRunner(ModelStages([model]), parallel), optimizer, [batch, batch], learning_rate=1e-2
    )


@contextmanager
def no_waits():
    """torch raises at any call that makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_never_waits_for_the_gpu(cuda):
    """The first step may: it loads kernels and allocates."""
    for dtype in (torch.float32, torch.bfloat16):
        model, optimizer, parallel = small_step(cuda, dtype)
        batch = batch_on(cuda)
        one_step(model, optimizer, parallel, batch)
        with no_waits():
            result = one_step(model, optimizer, parallel, batch)
        assert result.loss.isfinite().item()


# --- whole runs ---


def tiny_run_on(device, folder, dropout=0.1, **training):
    """20 iterations on mock data."""
    folder.mkdir()
    return replace(
        tiny_run(
            **training,
            metrics=folder / "metrics.jsonl",
            save=str(folder),
            hidden_dropout=dropout,
            attention_dropout=dropout,
        ),
        parallel=ParallelConfig(distributed_backend="gloo" if device.type == "cpu" else "auto"),
    )


def finish(config, device):
    """Runs it, on that device, and leaves torch's deterministic mode as it was."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            trainer = run_to_end(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {parameter.device for parameter in trainer.model.parameters()} == {device}
    return trainer


def rows_of(folder):
    return rows(folder / "metrics.jsonl")


def test_a_run_agrees_with_the_cpus(device, tmp_path):
    """Without dropout, whose draws differ between devices. Another attention kernel on the CPU
    moves the losses by 3e-7."""
    for name, where in (("reference", CPU), ("run", device)):
        finish(tiny_run_on(where, tmp_path / name, dropout=0.0), where)
    for ours, theirs in zip(
        rows_of(tmp_path / "run"), rows_of(tmp_path / "reference"), strict=True
    ):
        assert abs(ours["lm_loss"] - theirs["lm_loss"]) < 1e-4
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < 1e-2 * theirs["grad_norm"]


def check_resumed(device, folder, **training):
    """10 iterations, a checkpoint, 10 more: weights, moments and losses, bit for bit, with dropout.

    Returns the rows.
    """

    def config_of(name, **more):
        return tiny_run_on(device, folder / name, **training, deterministic_mode=True, **more)

    uninterrupted = finish(config_of("whole"), device)
    part = config_of("parts", exit_interval=10)
    assert finish(part, device).progress.iteration == 10
    again = replace(
        part,
        checkpoint=replace(part.checkpoint, load=part.checkpoint.save),
        training=replace(part.training, exit_interval=None),
    )
    resumed = finish(again, device)
    assert rows_of(folder / "parts") == rows_of(folder / "whole")
    assert same(
        state_of(resumed.model, resumed.optimizer),
        state_of(uninterrupted.model, uninterrupted.optimizer),
    )
    return rows_of(folder / "whole")


def test_a_resumed_run_ends_as_an_uninterrupted_one(device, tmp_path):
    for bf16 in (False, True):
        (tmp_path / str(bf16)).mkdir()
        check_resumed(device, tmp_path / str(bf16), bf16=bf16)
