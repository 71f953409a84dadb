"""megatron-core saves checkpoints, and they are converted: the same logits, loss and optimizer
states. And the other way round: it loads what a conversion wrote, strictly."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_lite.tools.convert import formats
from tests.support.equality import LATENT, LLAMA, difference
from tests.support.models import build_tiny_model, load_whole_, sample_tokens, tiny_config, tp_state
from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core")
from tests.support import megatron_core

MODELS = {
    "llama": dict(
        LLAMA,
        group_query_attention=True,
        num_query_groups=2,
        untie_embeddings_and_output_weights=True,
        qk_layernorm=True,
    ),
    "gpt2": dict(bias_gelu_fusion=False),
}
MODELS["experts"] = {
    **MODELS["llama"],
    **dict(num_experts=4, moe_layer_freq=(0, 1, 1), moe_ffn_hidden_size=24),
    **dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True),
    **dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
}
MODELS["mixtral"] = {
    **MODELS["llama"],
    **dict(num_experts=4, moe_router_pre_softmax=True, add_bias_linear=True),
}
MODELS["latents"] = {
    **dict(LLAMA, **LATENT, q_lora_rank=8, qk_layernorm=True),
    **dict(rotary_scaling_factor=3.0, original_max_position_embeddings=20, mscale=0.8),
}
MODELS["deepseek"] = {
    **MODELS["latents"],
    **dict(q_lora_rank=None, untie_embeddings_and_output_weights=True),
    **dict(num_experts=4, moe_layer_freq=(0, 1, 1), moe_ffn_hidden_size=24),
    **dict(moe_shared_expert_intermediate_size=20, moe_router_pre_softmax=True),
}
SOURCES = {"megatron": "legacy", "megatron-dist": "dist"}
F32, BF16 = torch.float32, torch.bfloat16


def config_of(name):
    return tiny_config(**MODELS[name])


def save(rank, world_size, root, name, dtype):
    """Returns the logits and the loss of a trained model, and this rank's states by parameter."""
    config = config_of(name)
    with megatron_core.on_cpu(world_size):
        model = megatron_core.their_model(config, world_size, dtype)
        tokens, labels = sample_tokens()
        optimizer = megatron_core.trained(model, tokens, labels)
        args = megatron_core.arguments(config, world_size)
        megatron_core.save_legacy(root / "legacy", rank, args, model, optimizer)
        megatron_core.save_dist(root / "dist", args, model, optimizer)
        states = {}
        for key, parameter in model.named_parameters():
            main = getattr(parameter, "main_param", parameter)
            state = optimizer.optimizer.state[main]
            states[key] = {
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
                "master": main.detach(),
            }
        return megatron_core.their_results(model, tokens, labels), copy.deepcopy(states)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the folder of a checkpoint and what `save` returned on each rank."""
    found = {}

    def make(name, tp_size, dtype=F32):
        key = (name, tp_size, dtype)
        if key not in found:
            root = tmp_path_factory.mktemp("saved")
            found[key] = (root, run_ranks(save, tp_size, root, name, dtype))
        return found[key]

    return make


def our_results(source):
    """Returns the logits and the loss of this project's model with the converted weights."""
    model, vocab_size = source.model, source.true_vocab_size
    tokens, labels = sample_tokens()
    with tp_state(1) as parallel, torch.no_grad():
        ours = build_tiny_model(model, parallel, dtype=F32, vocab_size=vocab_size)
        load_whole_(
            ours, {name: source.read(name) for name, _ in ours.named_parameters()}, parallel
        )
        logits = ours(tokens)
    return {"logits": logits, "loss": cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


CASES = [("llama", 1, F32), ("llama", 1, BF16), ("gpt2", 2, F32), ("experts", 1, F32)]
CASES += [("mixtral", 1, F32), ("latents", 1, F32), ("deepseek", 1, F32)]


@pytest.mark.parametrize("name, tp_size, dtype", CASES)
@pytest.mark.parametrize("format_name", SOURCES)
def test_a_converted_checkpoint_has_megatron_cores_logits_loss_and_states(
    saved, format_name, name, tp_size, dtype
):
    root, ranks = saved(name, tp_size, dtype)
    source = formats()[format_name].source(root / SOURCES[format_name])
    assert source.true_vocab_size == 61 and source.dtype == dtype
    expected, states = ranks[0]
    if dtype == F32:
        got = our_results(source)
        assert difference(expected["logits"], got["logits"]) < 1e-5
        assert abs(float(expected["loss"] - got["loss"])) < 1e-5
    if name not in ("llama", "latents"):
        return
    masters = ("master",) if dtype == BF16 else ()
    assert source.state_keys == ("exp_avg", "exp_avg_sq", *masters)
    assert (source.num_updates, source.notes) == (2, ())
    assert (source.progress.iteration, source.progress.consumed_samples) == (4, 24)
    assert states.keys() == source.specs.keys()
    for name, own in states.items():
        for key in source.state_keys:
            theirs = own[key][:61] if "word" in name or "output" in name else own[key]
            assert torch.equal(source.read(f"{name}/{key}"), theirs), (name, key)


@pytest.mark.parametrize("target_name", SOURCES)
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("llama", F32),
        ("experts", F32),
        ("latents", F32),
        pytest.param("llama", BF16, marks=pytest.mark.long),
    ],
)
def test_a_round_trip_is_bitwise(saved, tmp_path, target_name, name, dtype):
    """From torch_dist to this project's format, to Megatron's formats, and back."""
    root, _ = saved(name, 1, dtype)
    first = formats()["megatron-dist"].source(root / "dist")
    ours = tmp_path / "ours"
    formats()["megatron-lite"].write(first, ours, tp_size=2)
    native = formats()["megatron-lite"].source(ours)
    split = dict(tp_size=2, pp_size=3) if target_name == "megatron" else {}
    formats()[target_name].write(native, tmp_path / "theirs", **split)
    last = formats()[target_name].source(tmp_path / "theirs")
    assert last.model == first.model
    assert last.state_keys == first.state_keys
    assert last.num_updates == first.num_updates == 2
    assert last.progress == first.progress
    for name in first.sizes:
        assert torch.equal(first.read(name), last.read(name)), name


def load(rank, world_size, root, name, format_name):
    """Returns megatron-core's results with the weights of a folder, and its optimizer's states."""
    with megatron_core.on_cpu(world_size):
        model = megatron_core.their_model(config_of(name), world_size, padded=128 * world_size)
        torch.manual_seed(8)
        for parameter in model.parameters():
            parameter.data.normal_()
        tokens, labels = sample_tokens()
        optimizer = megatron_core.trained(model, tokens, labels, steps=1)
        if format_name == "megatron":
            megatron_core.load_legacy(root, rank, model, optimizer)
        else:
            megatron_core.load_dist(root, model, optimizer)
        states = {
            key: optimizer.optimizer.state[parameter]["exp_avg"]
            for key, parameter in model.named_parameters()
        }
        steps = {float(state["step"]) for state in optimizer.optimizer.state.values()}
        return megatron_core.their_results(model, tokens, labels), states, steps


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize(
    "name, tp_size",
    [
        pytest.param("llama", 1, marks=pytest.mark.long),
        *(("gpt2", 2), ("experts", 1), ("mixtral", 1), ("latents", 1), ("deepseek", 1)),
    ],
)
@pytest.mark.parametrize("format_name", SOURCES)
def test_megatron_core_loads_an_exported_checkpoint_strictly(
    saved, tmp_path, format_name, name, tp_size
):
    root, before = saved(name, tp_size)
    source = formats()["megatron"].source(root / "legacy")
    options = dict(tp_size=tp_size) if format_name == "megatron" else {}
    formats()[format_name].write(source, tmp_path / "out", **options)
    ranks = run_ranks(load, tp_size, tmp_path / "out", name, format_name)
    for (results, states, steps), (expected, own) in zip(ranks, before, strict=True):
        assert torch.equal(results["logits"], expected["logits"])
        assert steps == {2.0}
        for key, state in states.items():
            if "word_embeddings" not in key and "output_layer" not in key:
                assert torch.equal(state, own[key]["exp_avg"]), key
