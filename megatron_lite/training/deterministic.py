"""Attention on CUDA: the kernel that is asked for. And `--deterministic-mode`: torch's settings,
and what they cost in attention.

Under deterministic algorithms torch takes FlashAttention 2 on CUDA, because cuDNN does not promise
to repeat its bits. No try can show that it does: on an H200, cuDNN's backward of a small shape gave
equal bits in four tries of one process, and other bits in the next one.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import attention as registry

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.model.attention import CoreAttention
from megatron_lite.model.gpt import ModelStages
from megatron_lite.parallel.compiled import first_line
from megatron_lite.parallel.state import ParallelState


def use_deterministic_algorithms() -> None:
    """Makes every later operation of this process repeatable bit for bit.

    torch raises an error at an operation that has no deterministic kernel. CPU runs are repeatable
    anyway. On a GPU, call this before the first matmul: cuBLAS reads its workspace setting then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # torch would fill every new tensor. Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


# What torch does differently under deterministic algorithms, of the operations of a step.
FORCED = (
    "--deterministic-mode forces one order of sums in the backward of attention, in the gradient "
    "of the embedding and at the labels of the loss, and one workspace of cuBLAS"
)
AUTO = "give --attention-backend auto"


def use_asked_attention_(
    model: ModelStages, config: RunConfig, parallel: ParallelState
) -> list[str]:
    """Tries the kernel of --attention-backend flash or fused at the run's shape. Returns the log's
    lines.

    flash is FlashAttention 3 or 4, without dropout, if its package is installed and it runs here;
    torch's registry then has it in the place of FlashAttention 2. All ranks take the same one: this
    issues all-reduces of one number.
    Raises InputError if the kernel does not run, or is not deterministic and has to be.
    """
    backend = config.model.attention_backend
    if backend == "fused" and config.training.deterministic_mode:
        raise InputError(
            "--attention-backend fused: --deterministic-mode needs a kernel that repeats its bits, "
            f"and cuDNN's attention does not promise that: {AUTO}"
        )
    run = _attention(model, config, parallel)

    def check() -> None:
        if backend == "fused" and config.training.precision == "fp32":
            raise InputError(
                f"--attention-backend fused: cuDNN's attention has no float32: {AUTO}, or --bf16"
            )
        try:
            run()
        except RuntimeError as error:
            raise InputError(
                f"--attention-backend {backend} has no kernel for this torch, GPU, shape and "
                f"{config.training.precision} ({first_line(error)}): {AUTO}"
            ) from error

    is_plain = config.model.attention_dropout == 0.0 and config.training.precision != "fp32"
    if backend == "flash" and is_plain and hasattr(registry, "restore_flash_attention_impl"):
        for name in ("FA3", "FA4"):
            try:
                registry.activate_flash_attention_impl(name)
                run()
                runs = True
            except torch.OutOfMemoryError:
                raise
            except Exception:  # not installed, or not for here: each package has its own errors
                runs = False
            if all(parallel.gathered(runs)):
                return [f"--attention-backend flash is {name} of torch's registry"]
            registry.restore_flash_attention_impl(_raise_warn=False)
    parallel.together("the kernel of --attention-backend", check)
    return []


def cost_of_determinism(
    model: ModelStages, config: RunConfig, parallel: ParallelState
) -> list[str]:
    """Returns the log's lines about --deterministic-mode on a GPU.

    They name the operations that determinism forces, and what it costs in attention at this shape.
    """
    run = _attention(model, config, parallel)
    forced = _milliseconds(run)
    torch.use_deterministic_algorithms(False)
    try:
        free = _milliseconds(run)
    finally:
        torch.use_deterministic_algorithms(True)
    return [
        f"{FORCED}. Attention of one layer, forward and backward, without dropout: {forced:.2f} ms,"
        f" and {free:.2f} ms without --deterministic-mode"
    ]


def _attention(
    stages: ModelStages, config: RunConfig, parallel: ParallelState
) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a function of the output and the gradients of attention, of random values at the
    run's shape. It has no dropout, which would draw, and no window, if there is such a layer."""
    model, tp_size = config.model, parallel.tp_size
    layers = [one for one in stages.modules() if isinstance(one, CoreAttention)]
    layer = next((one for one in layers if one.window is None), layers[0])
    heads, groups = model.num_attention_heads // tp_size, model.query_groups // tp_size
    s, b = config.data.seq_length, config.training.micro_batch_size
    dtype, device = next(iter(stages)).context.params_dtype, parallel.device
    draws = torch.Generator(device).manual_seed(1)
    # query, key, value and the gradient of the output, [s, b, heads, d]
    *inputs, grad_output = (
        torch.randn(
            s, b, count, model.head_dim, dtype=dtype, device=device, generator=draws
        ).requires_grad_()
        for count in (heads, groups, groups, heads)
    )

    def run() -> tuple[Tensor, ...]:
        layer.eval()
        try:
            with torch.enable_grad():
                output = layer(*inputs)
            return output.detach(), *torch.autograd.grad(output, inputs, grad_output.flatten(2))
        finally:
            layer.train()

    return run


def _milliseconds(run: Callable[[], object]) -> float:
    """Returns the time that a function takes on the GPU in its second run."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
