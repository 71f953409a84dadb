"""The units into which FSDP2 shards our model."""

from __future__ import annotations

import torch

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.state import ParallelState


def shard_model_(model: GPTModel, parallel: ParallelState, config: DataParallelConfig) -> None:
    """Shards the model in place: this rank keeps its rows of every parameter.

    Does nothing without --use-torch-fsdp2, or without other data-parallel ranks. The rows of a
    16-bit model become float32, and FSDP2 gathers them in 16 bits. The rank holds the whole model
    until this call, so the weights must fit on it once.
    """
    if not config.use_torch_fsdp2 or parallel.dp_cp_mesh is None:
        return
    from megatron_lite.parallel.fsdp import Wrapping, fully_shard_  # late: 0.6 s

    dtype = model.context.params_dtype
    rounded = dtype in (torch.bfloat16, torch.float16)
    own = dict(
        embedding=None if model.embedding is None else "embedding.word_embeddings",
        output=None if model.output_layer is None else "output_layer",
    )
    wrapping = Wrapping(
        layers="decoder.layers",
        reshard_after_forward=config.torch_fsdp2_reshard_after_forward,
        **(own if config.fsdp_memory_efficient_wrapping else {}),
    )
    reduce_dtype = torch.float32 if rounded else None
    if config.grad_reduce_in_bf16:
        reduce_dtype = torch.bfloat16
    fully_shard_(
        model,
        parallel.dp_cp_mesh,
        wrapping,
        compute_dtype=dtype if rounded else None,
        reduce_dtype=reduce_dtype,
        forward_methods=("run_stage",),  # `loss` calls it
    )
