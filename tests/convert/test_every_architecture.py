"""Every causal language model that transformers knows is exact here, or refused with a reason; and
what transformers takes for a missing key is what is taken here."""

import json

import pytest

from megatron_lite.config.hf_config import FAMILIES, REASONS, from_hf, meaning_of
from megatron_lite.config.model import ModelConfig

transformers = pytest.importorskip("transformers")
SIZES = dict(
    num_layers=8,
    hidden_size=1280,
    num_attention_heads=160,  # a multiple of every default of the key heads
    max_position_embeddings=64,
    ffn_hidden_size=40,
    kv_channels=8,
)


def test_every_architecture_is_exact_or_has_a_reason():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if transformers.__version__.startswith("5.23."):  # newer versions know more
        assert set(NAMES) <= {*FAMILIES, *REASONS} and len(NAMES) == 189
    assert not FAMILIES.keys() & REASONS.keys() and len(FAMILIES) >= 55
    for name, reason in REASONS.items():
        with pytest.raises(ValueError) as refused:
            from_hf({"model_type": name})
        assert f"has no counterpart here ({reason})" in str(refused.value) and len(reason) > 30


# CWM refuses a config without its rotary embedding, and the defaults of norm_topk_prob in dots1 and
# of layer_types in granitemoehybrid are refused here; the others have further sizes.
OTHERS = {"cwm", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe_lite", "granitemoehybrid"}
OTHERS |= {"granitemoeshared", "youtu"}


@pytest.mark.parametrize("name", sorted({*transformers.CONFIG_MAPPING} & FAMILIES.keys() - OTHERS))
def test_a_missing_key_has_the_default_of_transformers(name):
    """Left out is all but sizes, which every config.json has."""
    named = {row["field"]: key for key, row in FAMILIES[name]["keys"].items()}
    sizes = {named[field]: size for field, size in SIZES.items() if field in named}
    sizes["vocab_size"] = 61
    whole = transformers.AutoConfig.for_model(name, **sizes).to_json_string(use_diff=False)
    theirs, ours = from_hf(json.loads(whole)), from_hf({"model_type": name, **sizes})
    assert meaning_of(ModelConfig(**ours.fields)) == meaning_of(ModelConfig(**theirs.fields))
