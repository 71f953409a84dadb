"""Randomly initialised models of transformers with 3 layers of hidden size 32.

They are called as users call them: `model(input_ids=x, labels=x).loss` in training mode, without
options for caches, attention kernels or outputs. The tests are about this default behaviour. Each
model but Mamba has dropout. A forward and a backward take 5 to 15 ms.
"""

from functools import partial

import torch
import transformers
from torch import nn
from transformers import DynamicCache

from tests.support.foreign import Foreign

VOCAB, LENGTH = 61, 9
IDS = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
DECODER = dict(
    IDS,
    num_hidden_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=32,
    attention_dropout=0.1,
)
ENCODER = dict(
    num_hidden_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=48,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)


def tokens(number):
    """Returns token ids [2, 9] without special tokens. Equal numbers give equal ids."""
    return torch.randint(
        3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(40 + number)
    )


def language_loss(model, number):
    """Returns the loss of the default call."""
    return model(input_ids=tokens(number), labels=tokens(number)).loss


def made(prefix, head="ForCausalLM", **options):
    """Returns the model of transformers whose classes have the prefix."""
    config = getattr(transformers, f"{prefix}Config")(**options)
    return getattr(transformers, f"{prefix}{head}")(config).train()


gpt2 = partial(made, "GPT2", "LMHeadModel", **IDS, n_layer=3, n_embd=32, n_head=4, n_positions=32)
llama = partial(made, "Llama", **DECODER)
qwen3 = partial(made, "Qwen3", **DECODER, head_dim=8)
# Local and global attention in turn, and capped scores.
gemma2 = partial(made, "Gemma2", **DECODER, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
# Its routers have their own loss, which leaves layers by a side channel.
mixtral = partial(
    made,
    "Mixtral",
    **DECODER,
    num_local_experts=4,
    router_jitter_noise=0.1,
    output_router_logits=True,
    router_aux_loss_coef=0.5,
)
# Decoder layers read the encoder's output and the first one's position bias.
t5 = partial(
    made,
    "T5",
    "ForConditionalGeneration",
    vocab_size=VOCAB,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
    num_layers=3,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
)
bert = partial(
    made,
    "Bert",
    "ForMaskedLM",
    **ENCODER,
    vocab_size=VOCAB,
    pad_token_id=0,
    max_position_embeddings=32,
)
vit = partial(  # 2 x 2 patches
    made, "ViT", "ForImageClassification", **ENCODER, image_size=8, patch_size=4, num_labels=5
)
# It runs in its reference form, which works on every device.
mamba = partial(
    made,
    "Mamba",
    **IDS,
    num_hidden_layers=3,
    hidden_size=32,
    state_size=4,
    expand=1,
    time_step_rank=4,
)


def image_loss(model, number):
    """Returns the loss of the default call of an image classifier."""
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(50 + number))
    return model(pixel_values=pixels, labels=torch.tensor([1, 3])).loss


def masked_loss(model, number):
    """Returns the loss on sequences of unequal length. An attention mask goes to every layer."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0
    labels = tokens(number).masked_fill(mask == 0, -100)
    return model(input_ids=tokens(number), attention_mask=mask, labels=labels).loss


def attentions_loss(model, number):
    """Returns a loss that includes the attention maps of every layer, as in distillation."""
    found = model(input_ids=tokens(number), labels=tokens(number), output_attentions=True)
    return found.loss + sum(attention.square().mean() for attention in found.attentions)


def hidden_states_loss(model, number):
    """Returns a loss that includes the output of every layer."""
    found = model(input_ids=tokens(number), labels=tokens(number), output_hidden_states=True)
    return found.loss + sum(hidden.square().mean() for hidden in found.hidden_states)


class Prefixed(nn.Module):
    """Llama with learned keys and values before the text, passed as a cache (prefix tuning)."""

    def __init__(self):
        super().__init__()
        self.model = llama()
        # [layer, key or value, batch, heads, positions, channels]
        self.prefix = nn.Parameter(torch.randn(3, 2, 1, 2, 4, 8))

    def forward(self, input_ids):
        """Returns the loss."""
        cache = DynamicCache(
            [
                (layer[0].expand(2, -1, -1, -1), layer[1].expand(2, -1, -1, -1))
                for layer in self.prefix
            ]
        )
        return self.model(input_ids=input_ids, labels=input_ids, past_key_values=cache).loss


def family(build, *lists, loss=language_loss, may_refuse=False, inner=None):
    """Returns the description of a model of transformers. lists: by default "model.layers"."""
    lists = lists or ("model.layers",)
    return Foreign(build=build, loss=loss, lists=lists, may_refuse=may_refuse, inner=inner)


MAMBA2 = dict(
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=4
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
MOE = dict(EXPERTS, moe_intermediate_size=16)
LAYER_INPUTS = dict(
    num_hidden_layers=4,
    head_dim=8,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=8,
    num_kv_shared_layers=2,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
# The options, by the prefix of the classes.
# They have caches of several kinds, experts, or layers that share keys and values.
NEWER = {
    "Jamba": dict(
        EXPERTS,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "Bamba": dict(MAMBA2, attn_layer_indices=[1]),
    "FalconH1": dict(MAMBA2, mamba_d_ssm=64),
    "Lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
    "Qwen3Next": dict(
        MOE,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "Zamba2": dict(
        num_hidden_layers=4,
        mamba_d_state=8,
        mamba_ngroups=1,
        mamba_headdim=16,
        n_mamba_heads=4,
        chunk_size=4,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"] * 2,
        adapter_rank=4,
    ),
    "NemotronH": dict(
        num_hidden_layers=4,
        layers_block_type=["mamba", "attention", "moe", "mamba"],
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        chunk_size=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "GraniteMoeHybrid": dict(
        MAMBA2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    ),
    "Gemma3n": dict(LAYER_INPUTS, laurel_rank=4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]),
    "Gemma4": dict(LAYER_INPUTS, global_head_dim=8),
    "Qwen3Moe": dict(MOE, output_router_logits=True),
}


def newer(name):
    """Returns a family of NEWER, or None if the installed transformers lacks it."""
    model, of_text, config = (
        getattr(transformers, name + part, None) for part in ("ForCausalLM", "TextConfig", "Config")
    )
    config = of_text or config
    if model is None or config is None:
        return None
    return family(lambda: model(config(**(DECODER | NEWER[name]))).train())


FAMILIES = {
    "GPT-2": family(gpt2, "transformer.h"),
    "Llama": family(llama),
    "Qwen3": family(qwen3),
    "Gemma 2": family(gemma2),
    "Mixtral, router loss": family(mixtral),
    "T5": family(t5, "encoder.block", "decoder.block", inner="decoder.block.1.layer"),
    "BERT": family(bert, "bert.encoder.layer"),
    "ViT": family(vit, "vit.layers", loss=image_loss),
    "Mamba": family(mamba, "backbone.layers"),
}
# Some of these models with further inputs of a layer, or with a part of the loss that does not
# leave a layer by its first output.
VARIANTS = {
    "Llama, padded batch": family(llama, loss=masked_loss),
    "BERT, padded batch": family(bert, "bert.encoder.layer", loss=masked_loss),
    "GPT-2, eager attention": family(partial(gpt2, attn_implementation="eager"), "transformer.h"),
    "GPT-2, attentions in the loss": family(
        partial(gpt2, attn_implementation="eager"), "transformer.h", loss=attentions_loss
    ),
    "BERT, attentions in the loss": family(
        partial(bert, attn_implementation="eager"), "bert.encoder.layer", loss=attentions_loss
    ),
    "Llama, hidden states in the loss": family(llama, loss=hidden_states_loss),
    "Llama, learned prefix in the cache": family(
        Prefixed,
        "model.model.layers",
        may_refuse=True,
        loss=lambda model, number: model(tokens(number)),
    ),
}
