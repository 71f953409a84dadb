"""Attention on CUDA: the kernel that is asked for. And `--deterministic-mode`: torch's settings,
and the fastest attention that repeats its bits here.

Under deterministic algorithms torch takes FlashAttention 2 on CUDA, because cuDNN does not promise
to repeat itself. Whether it does depends on its release, the GPU and the shape. So the run tries
both at its own shape before it starts, and takes the faster one that gave equal bits every time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.model.attention import CoreAttention
from megatron_lite.model.gpt import ModelStages
from megatron_lite.parallel.state import ParallelState

TRIES = 3  # each backward of them is compared with the first
FLASH, CUDNN = "FlashAttention 2", "cuDNN"
FREE = "torch's choice without --deterministic-mode"
Kernel = Callable[[], AbstractContextManager[object]]


def use_deterministic_algorithms() -> None:
    """Makes every later operation of this process repeatable bit for bit.

    torch raises an error at an operation that has no deterministic kernel. CPU runs are repeatable
    anyway. On a GPU, call this before the first matmul: cuBLAS reads its workspace setting then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # torch would fill every new tensor. Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def cudnn_attention() -> Iterator[None]:
    """Makes torch's attention run cuDNN's kernel, also under deterministic algorithms."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    strict = torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        torch.use_deterministic_algorithms(strict, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(strict)


@contextmanager
def as_without_determinism() -> Iterator[None]:
    """Makes torch choose as without deterministic algorithms."""
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


# What torch does differently under deterministic algorithms, of the operations of a step.
FORCED = (
    "--deterministic-mode forces one order of sums in the backward of attention, in the gradient "
    "of the embedding and at the labels of the loss, and one workspace of cuBLAS"
)
FUSED = "--attention-backend fused: --deterministic-mode needs a kernel that repeats its bits"
AUTO = "give --attention-backend auto"
KERNELS: Mapping[str, Kernel] = {FLASH: nullcontext, CUDNN: cudnn_attention}


class Tried(NamedTuple):
    """Tells what became of one kernel.

    milliseconds: the time of a forward and backward. None: it does not run here.
    repeats: whether all tries gave equal bits.
    """

    milliseconds: float | None
    repeats: bool = False


def tried(
    run: Callable[[], Sequence[Tensor]], milliseconds: Callable[[Callable[[], object]], float]
) -> Tried:
    """Tries one kernel.

    run: a forward and backward; returns the output and the gradients.
    milliseconds: returns how long a call of a function takes.
    """
    try:
        first = [one.clone() for one in run()]
        repeats = all(
            torch.equal(one, other)
            for _ in range(TRIES)
            for one, other in zip(first, run(), strict=True)
        )
        return Tried(milliseconds(run), repeats)
    except RuntimeError:  # torch has no such kernel for this device, dtype or shape
        return Tried(None)


def use_asked_attention_(
    model: ModelStages, config: RunConfig, parallel: ParallelState
) -> list[str]:
    """Tries the kernel of --attention-backend flash or fused at the run's shape. Returns the log's
    lines.

    flash is FlashAttention 3 or 4, without dropout, if its package is installed and it runs here;
    torch's registry then has it in the place of FlashAttention 2. All ranks take the same one: this
    issues all-reduces of one number.
    Raises InputError if the kernel does not run.
    """
    backend = config.model.attention_backend
    if backend == "fused" and config.training.deterministic_mode:
        return []  # `choose_attention_` tries it
    run = partial(_attention, _layer(model), _values(config, parallel))

    def check() -> None:
        if backend == "fused" and config.training.precision == "fp32":
            raise InputError(
                f"--attention-backend fused: cuDNN's attention has no float32: {AUTO}, or --bf16"
            )
        try:
            run()
        except RuntimeError as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(
                f"--attention-backend {backend} has no kernel for this torch, GPU, shape and "
                f"{config.training.precision} ({first}): {AUTO}"
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
            if parallel.all_agree(runs):
                return [f"--attention-backend flash is {name} of torch's registry"]
            registry.restore_flash_attention_impl(_raise_warn=False)
    parallel.together("the kernel of --attention-backend", check)
    return []


def choose_attention_(model: ModelStages, config: RunConfig, parallel: ParallelState) -> list[str]:
    """Makes attention run the fastest kernel that repeats its bits. Returns the log's lines.

    They name the operations that determinism forces, and what it costs in attention. Attention with
    dropout, a window, documents or context parallelism keeps the kernel that it has.
    All ranks take the same kernel: this issues one all-reduce of one number.
    """
    if parallel.device.type != "cuda" or not config.training.deterministic_mode:
        return []
    backend = config.model.attention_backend
    own_kernels = {
        "--attention-dropout": config.model.attention_dropout > 0.0,
        f"--attention-backend {backend}": backend not in ("auto", "fused"),
        "--context-parallel-size": config.parallel.context_parallel_size > 1,
        "--reset-attention-mask": config.data.reset_attention_mask,
    }
    kept = [flag for flag, holds in own_kernels.items() if holds]
    if backend == "fused" and config.model.attention_dropout > 0.0:
        raise InputError(f"{FUSED}, and it is tried without --attention-dropout: {AUTO}")
    if kept:
        return [FORCED, f"deterministic attention has torch's deterministic kernel: {kept[0]}"]
    run = partial(_attention, _layer(model), _values(config, parallel))
    results = {name: tried(partial(run, one), _milliseconds) for name, one in KERNELS.items()}
    flash, cudnn = results[FLASH].milliseconds, results[CUDNN]
    is_faster = cudnn.milliseconds is not None and (flash is None or cudnn.milliseconds < flash)
    if backend == "fused" and not parallel.all_agree(cudnn.repeats):
        raise InputError(f"{FUSED}, and cuDNN's attention does not here: {AUTO}")
    is_faster = is_faster or backend == "fused"
    taken = CUDNN if parallel.all_agree(cudnn.repeats and is_faster) else FLASH
    if taken == CUDNN:
        for module in model.modules():
            if isinstance(module, CoreAttention):
                module.kernel = cudnn_attention
    results[FREE] = tried(partial(run, as_without_determinism), _milliseconds)
    return [FORCED, line(results, taken)]


def line(results: Mapping[str, Tried], taken: str) -> str:
    """Returns the log's line about the kernels that were tried."""
    texts = {
        name: "does not run here"
        if one.milliseconds is None
        else f"{one.milliseconds:.2f} ms"
        + (f", equal bits in {TRIES + 1} tries" if one.repeats else ", does not repeat its bits")
        for name, one in results.items()
    }
    others = "; ".join(f"{name}: {text}" for name, text in texts.items() if name != taken)
    return (
        f"deterministic attention is {taken}'s: {texts[taken]} for a forward and backward of one "
        f"layer ({others})"
    )


def _layer(model: ModelStages) -> CoreAttention:
    """Returns a layer's attention, without a window if there is one."""
    layers = [one for one in model.modules() if isinstance(one, CoreAttention)]
    return next((one for one in layers if one.window is None), layers[0])


def _attention(
    layer: CoreAttention, values: Sequence[Tensor], kernel: Kernel | None = None
) -> tuple[Tensor, ...]:
    """Returns the output and the gradients of attention without dropout, which would draw.

    values: query, key, value and the gradient of the output, [s, b, heads, d].
    kernel: the context in place of the layer's own.
    """
    own, layer.kernel = layer.kernel, kernel or layer.kernel
    layer.eval()
    try:
        with torch.enable_grad():
            output = layer(*values[:3])
        return output.detach(), *torch.autograd.grad(output, values[:3], values[3].flatten(2))
    finally:
        layer.kernel = own
        layer.train()


def _values(config: RunConfig, parallel: ParallelState) -> list[Tensor]:
    """Returns random values for `_attention` at the run's shape."""
    model, tp_size = config.model, parallel.tp_size
    heads, groups = model.num_attention_heads // tp_size, model.query_groups // tp_size
    s, b = config.data.seq_length, config.training.micro_batch_size
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype, device = dtypes[config.training.precision], parallel.device
    draws = torch.Generator(device).manual_seed(1)
    return [
        torch.randn(
            s, b, count, model.head_dim, dtype=dtype, device=device, generator=draws
        ).requires_grad_()
        for count in (heads, groups, groups, heads)
    ]


def _milliseconds(run: Callable[[], object]) -> float:
    """Returns the time that a function takes on the GPU, after it has run before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
