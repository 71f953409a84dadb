"""Every family of Hugging Face: config and weights in, a checkpoint of this project, and out
again. transformers opens the result."""

import json

import pytest
import torch

from megatron_lite.config.hf_config import FAMILIES
from megatron_lite.convert.hf import hf_source, write_hf
from tests.support.conversions import (
    converted,
    rewrite,
    same_weights,
    save_tokenizer,
    saved_peer,
    weights_in,
)
from tests.support.hf import PEERS, our_config
from tests.support.models import sample_tokens
from tests.support.pairs import sampled

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def test_every_family_has_a_peer_of_transformers():
    assert FAMILIES.keys() == {PEERS[name]().config.model_type for name in PEERS}


@pytest.mark.parametrize("name", sampled(list(PEERS), every=5))
def test_a_round_trip_is_bitwise_and_transformers_opens_it(name, tmp_path):
    model = saved_peer(name, tmp_path / "theirs")
    tp_size = "2" if our_config(model).query_groups > 1 else "1"
    layout = ("--tensor-model-parallel-size", tp_size, "--pipeline-model-parallel-size", "2")
    assert converted(tmp_path / "theirs", tmp_path / "ours", "hf megatron-lite", *layout) == 0
    family = ("--hf-family", model.config.model_type)
    assert converted(tmp_path / "ours", tmp_path / "again", "megatron-lite hf", *family) == 0
    assert same_weights(weights_in(tmp_path / "theirs"), weights_in(tmp_path / "again"))
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", output_loading_info=True, attn_implementation="eager"
    )
    assert {key: value for key, value in info.items() if value} == {}
    tokens, _ = sample_tokens()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again.eval()(tokens).logits)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "glm", "phi3 with longrope"])
def test_weights_keep_their_dtype_and_their_tokenizer(name, tmp_path):
    model = PEERS[name]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    assert converted(tmp_path / "theirs", tmp_path / "ours", "hf megatron-lite") == 0
    assert converted(tmp_path / "ours", tmp_path / "again", "megatron-lite hf") == 0
    assert same_weights(weights_in(tmp_path / "theirs"), weights_in(tmp_path / "again"))
    config = json.loads((tmp_path / "again/config.json").read_text())
    ids = config["eos_token_id"]
    assert (config["torch_dtype"], ids) == ("bfloat16", model.config.eos_token_id)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer("to be or not").input_ids == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["qwen3", "cohere2"])
def test_shards_have_at_most_the_size_and_an_index(name, tmp_path):
    model = saved_peer(name, tmp_path / "theirs")
    source = hf_source(tmp_path / "theirs")
    write_hf(source, tmp_path / "again", lambda _: None, shard_bytes=10_000)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert (
        len(files) > 3
        and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    )
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    tensors = weights_in(tmp_path / "again")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert same_weights(model.state_dict(), again.state_dict())  # also of a tied head
    assert converted(tmp_path / "again", tmp_path / "ours", "hf megatron-lite") == 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_without_their_prefix_and_buffers_are_understood(name, tmp_path):
    saved_peer(name, tmp_path / "theirs")
    expected = weights_in(tmp_path / "theirs")
    prefix = {"gpt2": "transformer.", "llama": "model."}[name]

    def change(tensors):
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)
        for layer in range(2):
            if name == "gpt2":
                tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 17, 17)
                tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
            else:
                tensors[f"layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
        if name == "gpt2":
            tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    rewrite(tmp_path / "theirs", change)
    assert converted(tmp_path / "theirs", tmp_path / "ours", "hf megatron-lite") == 0
    assert converted(tmp_path / "ours", tmp_path / "again", "megatron-lite hf") == 0
    assert same_weights(expected, weights_in(tmp_path / "again"))
