"""Model variants that together use every option, and the error of a sharded run of one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState
from tests.support.models import (
    SEQ_LENGTH,
    Outcome,
    build_tiny_model,
    loss_and_grads,
    sample_tokens,
    specs_of,
    tiny_config,
    tp_state,
    whole_tensors,
)

LLAMA = dict(
    position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False
)
# 4 groups: one per rank at TP 4
GQA = dict(num_attention_heads=8, group_query_attention=True, num_query_groups=4)

# Each name is the published model that the variant resembles. Sizes: hidden 32, ffn 40, heads of 6
# channels, 61 token ids.
VARIANTS: dict[str, dict[str, object]] = {
    "gpt2": dict(attention_backend="flash"),
    "llama": dict(
        LLAMA, **GQA, untie_embeddings_and_output_weights=True, attention_backend="flash"
    ),
    "qwen": dict(LLAMA, **GQA, add_qkv_bias=True, qk_layernorm=True, attention_backend="unfused"),
    "neox": dict(
        position_embedding_type="rope",
        rotary_percent=0.67,
        bias_gelu_fusion=False,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=True,
        attention_backend="unfused",
        attention_softmax_in_fp32=True,
    ),
    "nemotron": dict(
        GQA,
        position_embedding_type="none",
        fp32_residual_connection=True,
        squared_relu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    ),
    "olmo": dict(
        LLAMA,
        **GQA,
        norm_position="after",
        qk_layernorm=True,
        qk_layernorm_scope="all-heads",
        apply_layernorm_1p=True,
        untie_embeddings_and_output_weights=True,
    ),
    "pythia": dict(
        parallel_residual=True,
        fp32_residual_connection=True,
        qk_layernorm=True,
        apply_layernorm_1p=True,
        position_embedding_type="rope",
        rotary_percent=0.67,
        bias_gelu_fusion=False,
        untie_embeddings_and_output_weights=True,
    ),
    "mixtral": dict(
        LLAMA,
        **GQA,
        num_experts=4,
        moe_ffn_hidden_size=64,
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.1,
        untie_embeddings_and_output_weights=True,
    ),
    "deepseek": dict(
        LLAMA,
        num_experts=8,
        moe_layer_freq=2,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_shared_expert_gate=True,
        moe_router_topk=4,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_router_dtype="fp64",
        moe_aux_loss_coeff=0.1,
        untie_embeddings_and_output_weights=True,
    ),
}


@dataclass(frozen=True)
class Training:
    """The loss and gradient norm of every step, and the whole weights after the last step."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def variant_config(name: str, **overrides: object) -> ModelConfig:
    """Returns the config of a variant's tiny model with 2 layers."""
    return tiny_config(**{"num_layers": 2, **VARIANTS[name], **overrides})


def gradients(
    name: str,
    parallel: ParallelState,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    cp_comm_type: str = "p2p",
    seq_length: int = SEQ_LENGTH,
) -> Outcome:
    """Returns the loss and the whole gradients of a variant over two micro-batches."""
    model = build_tiny_model(
        variant_config(name),
        parallel,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        cp_comm_type=cp_comm_type,
    )
    return loss_and_grads(model, parallel, seq_length=seq_length)


def unsharded_gradients(
    name: str, dtype: torch.dtype = torch.float64, seq_length: int = SEQ_LENGTH
) -> Outcome:
    """Returns `gradients` computed in this process alone, without groups and collectives."""
    with tp_state(1) as parallel:
        return gradients(name, parallel, dtype=dtype, seq_length=seq_length)


def train(
    name: str,
    parallel: ParallelState,
    *,
    steps: int,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
    clip_grad: float = 1.0,
    cp_comm_type: str = "p2p",
) -> Training:
    """Trains a variant by `steps` AdamW updates.

    Each uses the same 4 sequences, split over the data-parallel and context-parallel ranks.
    """
    model = build_tiny_model(
        variant_config(name),
        parallel,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        cp_comm_type=cp_comm_type,
    )
    optimizer = Optimizer(model, OptimizerConfig(clip_grad=clip_grad), parallel)
    losses, grad_norms = [], []
    for _ in range(steps):
        losses.append(_backward(model, optimizer, parallel))
        grad_norms.append(optimizer.step(learning_rate=0.003).grad_norm.item())
    parameters = dict(model.named_parameters())
    weights = whole_tensors(parameters, specs_of(model), parallel)
    return Training(losses, grad_norms, weights)


def _backward(model: GPTModel, optimizer: Optimizer, parallel: ParallelState) -> float:
    optimizer.zero_grad()
    tokens, labels = (
        x.chunk(parallel.dp_size)[parallel.dp_rank]
        for x in sample_tokens(batch=4, parallel=parallel)
    )
    loss = model.loss(tokens, labels).mean() / parallel.dp_cp_size
    loss.backward()
    return all_reduce_(loss.detach().double(), parallel.dp_cp_group).item()


def difference(expected: Tensor, actual: Tensor) -> float:
    """Returns the largest error relative to the largest expected value.

    It is infinite if the shapes differ or a value is not finite.
    """
    if expected.shape != actual.shape or not actual.isfinite().all():
        return float("inf")
    error = (expected.double() - actual.double()).abs().max() / expected.double().abs().max()
    return error.item() if error == error else 0.0  # 0/0: both are all zeros


def differences(expected: Outcome, actual: Outcome) -> dict[str, float]:
    """Returns the difference of the loss, as "loss", and of each gradient, by parameter name."""
    assert expected.grads.keys() == actual.grads.keys()
    return {
        "loss": difference(expected.loss, actual.loss),
        **{name: difference(grad, actual.grads[name]) for name, grad in expected.grads.items()},
    }
