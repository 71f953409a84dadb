"""The flags of ModelConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config import megatron_values
from megatron_lite.config.model import (
    ACTIVATIONS,
    ATTENTION_BACKENDS,
    NORM_IMPLS,
    NORM_POSITIONS,
    NORMALIZATIONS,
    POSITION_EMBEDDING_TYPES,
    QK_LAYERNORM_SCOPES,
    SWITCHED_ACTIVATIONS,
    ModelConfig,
)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "model", ModelConfig)
    group.value("--num-layers", int, "transformer layers")
    group.value("--hidden-size", int, "channels of the residual stream")
    group.value("--num-attention-heads", int, "attention heads")
    group.value("--max-position-embeddings", int, "longest sequence that the model can read")
    group.value(
        "--ffn-hidden-size",
        int,
        "channels inside the MLP; derived: 4 x hidden, or 8/3 x hidden with --swiglu",
    )
    group.value("--kv-channels", int, "channels of one head; derived: hidden / heads")
    group.switch("--group-query-attention", "share keys and values among groups of heads")
    group.value("--num-query-groups", int, "groups of --group-query-attention")
    group.value(
        "--position-embedding-type", str, "position embedding", values=POSITION_EMBEDDING_TYPES
    )
    group.switch("--use-rotary-position-embeddings", "the same as --position-embedding-type rope")
    group.switch(
        "--no-position-embedding",
        "--position-embedding-type none, unless rope is chosen: then nothing",
    )
    group.value("--rotary-base", int, "base of the rotary frequencies")
    group.value("--rotary-percent", float, "share of a head's channels that is rotated")
    group.switch("--use-rope-scaling", "scale the rotary frequencies by Llama 3.1's rule")
    group.value("--rope-scaling-factor", float, "factor of --use-rope-scaling")
    group.value(
        "--rotary-seq-len-interpolation-factor",
        int,
        "divide the positions of the rotary embedding by N, for sequences N times as long",
    )
    group.value(
        "--no-rope-freq",
        str,
        "every N-th layer does not rotate queries and keys; or a list with 1 for each layer that "
        "does not, such as ([0]*3+[1])*2",
    )
    group.switch(
        "--parallel-residual",
        "attention and the MLP read the same input, and the layer adds both to it, as in GPT-NeoX",
    )
    group.value(
        "--norm-position",
        str,
        "norms before attention and the MLP, or after each and before the residual is added, as in "
        "OLMo 2",
        values=NORM_POSITIONS,
    )
    group.value("--normalization", str, "norm of every layer", values=NORMALIZATIONS)
    group.value(
        "--norm-impl",
        str,
        "whose kernel computes the norms: torch's, or NVIDIA apex's on CUDA (docs/apex.md)",
        values=NORM_IMPLS,
    )
    group.value("--norm-epsilon", float, "added to the variance in a norm")
    group.switch(
        "--apply-layernorm-1p", "norms multiply by 1 + their weight, and the weight starts at zero"
    )
    group.switch("--qk-layernorm", "norm of queries and keys, per head")
    group.value(
        "--qk-layernorm-scope",
        str,
        "channels of each norm of --qk-layernorm: those of one head, or of all heads as in OLMo 2",
        values=QK_LAYERNORM_SCOPES,
    )
    for activation in SWITCHED_ACTIVATIONS:
        group.switch(f"--{activation.replace('_', '-')}", ACTIVATIONS[activation].help)
    group.off_switch(
        "--no-bias-gelu-fusion", "bias_gelu_fusion", "exact (erf) GELU instead of its tanh form"
    )
    group.off_switch("--disable-bias-linear", "add_bias_linear", "no bias in the linear layers")
    group.switch("--add-qkv-bias", "bias in the QKV projection, also with --disable-bias-linear")
    group.switch(
        "--untie-embeddings-and-output-weights",
        "an output matrix of its own instead of the word embeddings",
    )
    group.value(
        "--attention-backend",
        str,
        "core attention: flash is torch's SDPA, unfused builds the scores",
        values=(*ATTENTION_BACKENDS, *megatron_values.ATTENTION_BACKENDS),
    )
    group.switch("--attention-softmax-in-fp32", "softmax of unfused attention in float32")
    group.value(
        "--window-size",
        str,
        "LEFT,0: a query reads the LEFT tokens before its own, and its own; else all before",
    )
    group.value(
        "--window-attn-skip-freq",
        str,
        "every N-th layer has no window; or a list with 1 for each layer that has it, "
        "such as ([1]*3+[0])*2",
    )
    group.switch("--fp32-residual-connection", "residual stream in float32 under --bf16 and --fp16")
    group.value("--hidden-dropout", float, "dropout of embeddings and of what each layer adds")
    group.value("--attention-dropout", float, "dropout of attention probabilities")
    group.value("--init-method-std", float, "standard deviation of the initial weights")
