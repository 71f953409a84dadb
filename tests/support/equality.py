"""Model variants that together use every option, and the error of a sharded run of one."""

from tests.support.models import tiny_config

LLAMA = dict(
    position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False
)
LATENT = dict(
    multi_latent_attention=True, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=7
)
# 4 groups: one per rank at TP 4
GQA = dict(num_attention_heads=8, group_query_attention=True, num_query_groups=4)

# Two ranks have different experts: each row goes to the rank of its expert, or all ranks have all.
SENT = dict(expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall")
GATHERED = dict(SENT, moe_token_dispatcher_type="allgather")

# Each name is the published model that the variant resembles. Sizes: hidden 32, ffn 40, heads of 6
# channels, 61 token ids.
VARIANTS = {
    "gpt2": dict(attention_backend="flash"),
    "llama": dict(
        LLAMA, **GQA, untie_embeddings_and_output_weights=True, attention_backend="flash"
    ),
    "qwen": dict(LLAMA, **GQA, add_qkv_bias=True, qk_layernorm=True, attention_backend="unfused"),
    "neox": dict(
        position_embedding_type="rope",
        rotary_percent=0.67,
        rotary_interleaved=True,
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
        **LATENT,
        q_lora_rank=8,
        qk_layernorm=True,
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
    "gshard": dict(
        {**LLAMA, "add_bias_linear": True},
        num_experts=4,
        moe_ffn_hidden_size=48,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.1, 0.2),
        moe_input_jitter_eps=0.2,
        moe_expert_capacity_factor=0.9,
        moe_pad_expert_input_to_capacity=True,
    ),
    "gemma": dict(
        GQA,
        position_embedding_type="rope",
        normalization="RMSNorm",
        geglu=True,
        add_bias_linear=False,
        norm_position="both",
        apply_layernorm_1p=True,
        embedding_multiplier=5.0,
        softmax_scale=0.3,
        window_size=(3, 0),
        window_attn_skip_freq=2,
        rotary_base_local=100,
        attention_backend="flash",
    ),
    "cohere": dict(
        position_embedding_type="rope",
        normalization="BiaslessLayerNorm",
        swiglu=True,
        add_bias_linear=False,
        parallel_residual=True,
        shared_norm=True,
        logits_scaling=4.0,
    ),
    "granite": dict(
        LLAMA,
        **GQA,
        residual_multiplier=0.22,
        add_qkv_bias=True,
        add_proj_bias=True,
        attn_logit_softcapping=0.7,  # those of Gemma 2
        final_logit_softcapping=1.5,
    ),
}
# What depends on how many tokens a router sees, or on the streams of a layout.
OF_A_LAYOUT = dict(
    moe_input_jitter_eps=None,
    moe_expert_capacity_factor=None,
    moe_pad_expert_input_to_capacity=False,
)

# Layers that differ. No two stages of a pipeline of 8 layers hold the same ones.
DIFFERING = dict(
    LLAMA, **GQA, num_layers=8, window_size=(3, 0), window_attn_skip_freq=3, no_rope_freq=2
)


def variant_config(name, **overrides):
    """Returns the config of a variant's tiny model with 2 layers."""
    return tiny_config(**{"num_layers": 2, **VARIANTS[name], **overrides})


def difference(expected, actual, floor=0.0):
    """Returns the largest error relative to the largest expected value, or to `floor`.

    It is infinite if the shapes differ or a value is not finite.
    """
    if expected.shape != actual.shape or not actual.isfinite().all():
        return float("inf")
    if not expected.numel():
        return 0.0
    largest = expected.double().abs().max().clamp(min=floor)
    error = (expected.double() - actual.double()).abs().max() / largest
    return error.item() if error == error else 0.0  # 0/0: both are all zeros


def differences(expected, actual):
    """Returns the difference of the loss, as "loss", and of each gradient, by parameter name."""
    assert expected.grads.keys() == actual.grads.keys()
    return {
        "loss": difference(expected.loss, actual.loss),
        **{name: difference(grad, actual.grads[name]) for name, grad in expected.grads.items()},
    }
