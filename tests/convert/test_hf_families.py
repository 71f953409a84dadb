"""Checkpoints of Hugging Face: every family goes there and back to the bit, and what does not map
is one clear error."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import FAMILIES, to_hf
from megatron_lite.convert import hf
from megatron_lite.convert.weights import WeightSource
from tests.convert.megatron.test_legacy_layouts import SINKHORN
from tests.support.conversions import (
    WORDS,
    converted,
    refusal,
    rewrite,
    same_weights,
    save_tokenizer,
    saved_peer,
    there_and_back,
    weights_in,
)
from tests.support.hf import PEERS, our_config
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.pairs import sampled

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def test_every_family_has_a_peer_of_transformers():
    assert FAMILIES.keys() == {PEERS[name]().config.model_type for name in PEERS}


@pytest.mark.parametrize("name", sampled(list(PEERS), every=5))
@torch.no_grad()
def test_a_round_trip_is_bitwise_and_transformers_opens_it(name, tmp_path):
    model = saved_peer(name, tmp_path / "theirs")
    tp_size = "2" if our_config(model).query_groups > 1 else "1"
    layout = ("--tensor-model-parallel-size", tp_size, "--pipeline-model-parallel-size", "2")
    assert converted(tmp_path, "hf theirs -> megatron-lite ours", *layout) == 0
    family = ("--hf-family", model.config.model_type)
    assert converted(tmp_path, "megatron-lite ours -> hf again", *family) == 0
    assert same_weights(weights_in(tmp_path / "theirs"), weights_in(tmp_path / "again"))
    assert torch.equal(model(TOKENS).logits, logits_of(tmp_path / "again"))


TOKENS, _ = sample_tokens()


def logits_of(folder):
    """Returns those of the model that transformers opens without a word."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()(TOKENS).logits


WINDOW = dict(window_size=(3, 0), window_attn_skip_freq=None)
STRETCHED = dict(rotary_scaling_factor=4.0, original_max_position_embeddings=8)
CHANGES = [
    dict(add_bias_linear=True, add_qkv_bias=False, add_proj_bias=False),
    dict(add_bias_linear=False, add_qkv_bias=True, add_proj_bias=True),
    dict.fromkeys([*WINDOW, "rotary_base_local", "no_rope_freq"]),
    WINDOW,
    WINDOW | dict(window_attn_skip_freq=2),
    dict(rotary_seq_len_interpolation_factor=2),
    dict(use_rope_scaling=True),
    dict(STRETCHED, rope_type="yarn"),
    dict(STRETCHED, rope_type="longrope", short_factor=(1.5,) * 3, long_factor=(2.0,) * 3),
    dict(kv_channels=16),
    dict(kv_channels=16, rotary_percent=0.375),
    dict(moe_router_num_groups=2, moe_router_group_topk=1, moe_router_group_best=2),
]


@pytest.mark.parametrize("name, change", sampled(product(PEERS, CHANGES), every=11))
@torch.no_grad()
def test_transformers_opens_whatever_is_exported(name, change, tmp_path):
    """A model of no file, without ids of tokens, with random weights."""
    peer = PEERS[name]()
    try:
        model = replace(our_config(peer), **change)
    except ValueError:
        return
    with tp_state(1) as parallel:
        ours = build_tiny_model(model, parallel, dtype=torch.float32, vocab_size=62)
        expected, weights = ours(TOKENS), ours.state_dict()
    dtypes = dict.fromkeys(weights, torch.float32)
    source = WeightSource(model=model, true_vocab_size=62, dtypes=dtypes, read=weights.__getitem__)
    for family in (None, peer.config.model_type):
        folder = tmp_path / str(family)
        try:
            hf.write(source, folder, family=family)
        except InputError:
            continue
        torch.testing.assert_close(logits_of(folder), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma3_text", "glm"])
def test_weights_keep_their_dtype_and_their_tokenizer(name, tmp_path):
    model = PEERS[name]().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    there_and_back(tmp_path)
    config = json.loads((tmp_path / "again/config.json").read_text())
    ids = config["eos_token_id"]
    assert (config["torch_dtype"], ids) == ("bfloat16", model.config.eos_token_id)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer("to be or not").input_ids == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["qwen3", "cohere2"])
def test_shards_have_at_most_the_size_and_an_index(name, tmp_path, monkeypatch):
    model = saved_peer(name, tmp_path / "theirs")
    source = hf.source(tmp_path / "theirs")
    monkeypatch.setattr("megatron_lite.convert.weights.SHARD_BYTES", 10_000)
    hf.write(source, tmp_path / "again")
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
    assert converted(tmp_path, "hf again -> megatron-lite ours") == 0


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
    assert converted(tmp_path, "hf theirs -> megatron-lite ours") == 0
    assert converted(tmp_path, "megatron-lite ours -> hf again") == 0
    assert same_weights(expected, weights_in(tmp_path / "again"))


pytest.importorskip("tokenizers")


def edit(name, change):
    def edited(folder):
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return edited


def tokenizer(change):
    def edited(folder):
        save_tokenizer(folder)
        edit("tokenizer.json", change)(folder)

    return edited


def text(name, content):
    def written(folder):
        save_tokenizer(folder)
        (folder / name).write_bytes(content)

    return written


def sizes(**values):
    """Returns a change of config.json."""
    return edit("config.json", lambda found: found.update(values))


def tensors(change, name="llama"):
    return lambda folder: (saved_peer(name, folder), rewrite(folder, change))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


HEAD = "lm_head.weight"
NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
CASES = {
    "no directory": (lambda folder: folder.rename(folder.with_name("gone")), "no such directory"),
    "dynamic": (
        sizes(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}),
        "does not map exactly: rope_scaling 'dynamic', which depends on the length of the text, is",
    ),
    "too few divisors": (
        sizes(rope_parameters=dict(rope_type="longrope", short_factor=[1.0], long_factor=[])),
        "--rope-type longrope needs --short-factor and --long-factor, each with a number for each",
    ),
    "pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "is pickled, and reading a pickle may run any code",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "truncated": (truncate, "it is missing, truncated or damaged, or no safetensors file"),
    "path in the index": (
        text(
            "model.safetensors.index.json",
            b'{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}',
        ),
        "'../elsewhere.safetensors', which is no file's name",
    ),
    "missing tensor": (tensors(lambda found: found.pop(QUERY)), f"lacks {QUERY}"),
    "extra tensor": (
        tensors(lambda found: found.update({"model.layers.7.x.weight": torch.ones(3)})),
        "holds model.layers.7.x.weight",
    ),
    "other shape": (
        tensors(lambda found: found.update({QUERY: torch.ones(8, 32)})),
        f"{QUERY} has the shape (8, 32), but config.json describes (24, 32)",
    ),
    "quantised": (
        tensors(lambda found: found.update({NORM: torch.ones(32, dtype=torch.int8)})),
        "final_layernorm.weight has the dtype I8, and only F64, F32, BF16, F16 are read",
    ),
    "a link to a secret": (
        lambda folder: (folder / "tokenizer.json").symlink_to("/proc/self/environ"),
        "tokenizer.json: is no regular file, but a link out of",
    ),
    "no JSON": (text("tokenizer_config.json", b"SECRET=1"), "not a tokenizer that can be read"),
    "no pairs": (text("merges.txt", b"root:x:0:0\n"), "line 1 is no pair of words"),
    "no object": (text("generation_config.json", b"[]"), "must be an object"),
    "one id": (
        tokenizer(lambda found: found["model"].update(vocab=dict.fromkeys(WORDS, 3))),
        "have one id, 3",
    ),
    "an id beyond": (
        tokenizer(lambda found: found["model"]["vocab"].update(late=61)),
        "the id of 'late' must be a whole number from 0 to 60 (got 61)",
    ),
    "a base of 400 digits": (sizes(rope_parameters={"rope_theta": 10**400}), "rope_theta must be"),
    "NaN": (
        tensors(lambda found: found[NORM][3:].fill_(float("nan"))),
        "decoder.final_layernorm.weight holds NaN or infinity",
    ),
    "a tied model whose head differs": (
        tensors(
            lambda found: found.update({HEAD: found["model.embed_tokens.weight"] + 1}), "gemma"
        ),
        "tie_word_embeddings true, but lm_head.weight differs",
    ),
    "two tensors of one weight": (
        tensors(
            lambda found: found.update({HEAD: torch.ones(1), "embed_out.weight": torch.ones(1)}),
            "gpt_neox",
        ),
        "remove one of them",
    ),
    "many layers": (sizes(num_hidden_layers=65536), "describes 65536 layers, and the files"),
    "many experts": (
        sizes(model_type="mixtral", num_local_experts=65536),
        "describes 65536 experts, and the files",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_source_that_does_not_map_is_one_clear_error(case, tmp_path):
    change, message = CASES[case]
    saved_peer("llama", tmp_path / "theirs")
    change(tmp_path / "theirs")
    error = refusal(tmp_path, "hf theirs -> megatron-lite ours")
    assert message in error and len(error.splitlines()) == 1 and len(error) <= 1024
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ours")]


@pytest.mark.parametrize(
    "fields, family, message",
    [
        (dict(), None, "this model exactly: --hf-family NAME tells what differs in one of"),
        (dict(), "llama", "--hf-family llama does not express this model: position_embedding_type"),
        (dict(), "bloom", "--hf-family bloom is not known, only gpt2, llama"),
        (
            dict(kv_channels=8, window_size=(3, 0)),
            "gpt2",
            "window of each layer is [(3, 0), (3, 0), (3, 0)] here and [None, None, None] there",
        ),
        (SINKHORN, "mixtral", "choice by Sinkhorn is True here and False there"),
    ],
)
def test_a_model_that_no_family_expresses_is_refused_with_the_difference(fields, family, message):
    with pytest.raises(ValueError) as refused:
        to_hf(tiny_config(**fields), 61, family)
    assert message in str(refused.value)
