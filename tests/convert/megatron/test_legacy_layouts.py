"""Legacy checkpoints of every release and layout: the files are split and named here by hand, as
Megatron-LM does it, from a model with known weights."""

import argparse
import itertools
from collections import OrderedDict
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.convert.megatron.legacy import source as legacy_source
from megatron_lite.convert.megatron.legacy import write as write_legacy
from megatron_lite.convert.weights import WeightSource, parameter_specs
from tests.support.models import tiny_config
from tests.support.pairs import in_one_test, pairs

V, PADDED = 61, 64
LLAMA = dict(num_layers=5, normalization="RMSNorm", swiglu=True, add_bias_linear=False)
WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def weights_of(config):
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(spec.global_shape, generator=generator)
        for name, spec in parameter_specs(config, V).items()
    }


def args_of(config, tp, pp, **more):
    values = asdict(config)
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    vocabulary = dict(tokenizer_type="NullTokenizer", vocab_size=V - 1)
    return argparse.Namespace(**{**values, **sizes, **vocabulary, **more})


def part(name, whole, rank, size):
    """What a TP rank holds, by the rules of Megatron-LM's layers."""
    if "word_embeddings" in name or name == OUTPUT:
        padded = torch.cat((whole, torch.full((PADDED - V, whole.shape[1]), 9.0)))
        return padded.chunk(size)[rank]
    rows = whole.ndim - 2 if name.endswith("weight") else 0  # experts have a dim in front
    if "linear_fc1" in name and whole.shape[rows] in (80, 48, 44):  # [gate; up]
        return torch.cat([block.chunk(size, rows)[rank] for block in whole.chunk(2, rows)], rows)
    if "linear_fc1" in name or "linear_qkv" in name:
        return whole.chunk(size)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(size, whole.ndim - 1)[rank]
    return whole


def save(root, config, stages, *, tp=1, ep=1, rename=lambda model: model, version=3.0, **args):
    """Writes the files. stages: in the order of the model (pipeline rank, key, its layers)."""
    weights = weights_of(config)
    pp = 1 + max(rank for rank, _, _ in stages)
    args = {**args, "expert_model_parallel_size": ep}
    for tp_rank, ep_rank in itertools.product(range(tp), range(ep)):
        files = {}
        for number, (pp_rank, key, layers) in enumerate(stages):
            model = OrderedDict()
            last = number == len(stages) - 1
            for name, whole in weights.items():
                _, _, rest = name.partition("decoder.layers.")
                layer, _, own = rest.partition(".")
                if rest and int(layer) in layers:
                    own = f"decoder.layers.{layers.index(int(layer))}.{own}"
                    model[own] = part(name, whole, tp_rank, tp)
                elif not rest and (number == 0 if name.startswith("embedding") else last):
                    model[name] = part(name, whole, tp_rank, tp)
            if last and number and OUTPUT not in weights:
                model[OUTPUT] = part(WORDS, weights[WORDS], tp_rank, tp)
            for name in [name for name in model if ".mlp.experts." in name]:
                model[name] = model[name].chunk(ep)[ep_rank]
            files.setdefault(pp_rank, {})[key] = rename(model)
        for pp_rank, chunks in files.items():
            numbers = (pp_rank,) * (pp > 1) + (ep_rank,) * (ep > 1)
            folder = f"mp_rank_{tp_rank:02d}" + "".join(f"_{one:03d}" for one in numbers)
            (root / "iter_0000040" / folder).mkdir(parents=True)
            value = dict(args=args_of(config, tp, pp, **args), iteration=40, **chunks)
            torch.save(
                {**value, "checkpoint_version": version},
                root / "iter_0000040" / folder / "model_optim_rng.pt",
            )
    (root / "latest_checkpointed_iteration.txt").write_text("40\n")
    return weights


def check(root, weights):
    source = legacy_source(root)
    assert source.true_vocab_size == V
    for name, whole in weights.items():
        assert torch.equal(source.read(name), whole), name
    return source


LAYOUTS = {
    "one file": [(0, "model", [0, 1, 2, 3, 4])],
    "uneven stages": [(0, "model", [0]), (1, "model", [1, 2]), (2, "model", [3, 4])],
    "interleaved stages": [
        (0, "model0", [0]),
        (1, "model0", [1]),
        (0, "model1", [2]),
        (1, "model1", [3, 4]),
    ],
}


@pytest.mark.parametrize("layout, tp, tied", pairs(LAYOUTS, [1, 2], [True, False]))
def test_every_layout_gives_the_whole_weights(layout, tp, tied, tmp_path):
    config = tiny_config(**LLAMA, untie_embeddings_and_output_weights=not tied)
    source = check(tmp_path, save(tmp_path, config, LAYOUTS[layout], tp=tp))
    assert source.model == config
    assert source.state_keys == ()
    assert "no optimizer states" in source.notes[0]


def te_names(model):
    """Transformer Engine's layers, whose linear layers hold the norms and FP8's scales."""
    found = OrderedDict()
    for name, value in model.items():
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        found[name] = value
        if "linear_" in name:
            found[name.rpartition(".")[0] + "._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    return found


GPT = tiny_config(num_layers=5)
EXPERTS = dict(
    **LLAMA,
    num_experts=4,
    moe_layer_freq=(0, 1, 0, 1, 1),
    moe_ffn_hidden_size=24,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=22,
    moe_shared_expert_gate=True,
)


def one_by_one(name, experts):
    """SequentialMLP."""
    for number, one in enumerate(experts):
        yield name.replace("experts.", f"experts.local_experts.{number}."), one.clone()


def grouped(name, experts):
    """TEGroupedMLP."""
    for number, one in enumerate(experts):
        yield f"{name}{number}", one.clone()


def in_one_matrix(name, experts):
    """GroupedMLP, whose forward views weight1 as [E, h, ..] and weight2 as [E, .., h]."""
    before, _, after = name.partition("linear_fc")
    rows = 32 if after[0] == "1" else -1
    yield f"{before}weight{after[0]}", experts.transpose(1, 2).reshape(rows, 32 if rows < 0 else -1)


def experts_as(form):
    """Returns a function that gives the experts of a model the names of a form."""

    def rename(model):
        found = OrderedDict()
        for name, value in model.items():
            found.update(form(name, value) if ".mlp.experts." in name else {name: value})
        return found

    return rename


def old_names(model, attention="self_attention"):
    """The names before Megatron core: nested dicts."""
    embedding = {}
    layers, inner = OrderedDict(), {"embedding": embedding}
    for name, value in model.items():
        if name.startswith("embedding."):
            embedding[name.split(".")[1]] = OrderedDict(weight=value)
        elif name == OUTPUT:
            inner["output_layer"] = OrderedDict(weight=value)
        else:
            for new, old in (
                ("decoder.", ""),
                ("self_attention.linear_qkv.", f"{attention}.query_key_value."),
                ("self_attention.linear_proj.", f"{attention}.dense."),
                ("self_attention.", f"{attention}."),
                ("mlp.linear_fc1.", "mlp.dense_h_to_4h."),
                ("mlp.linear_fc2.", "mlp.dense_4h_to_h."),
                ("pre_mlp_layernorm.", "post_attention_layernorm."),
            ):
                name = name.replace(new, old)
            layers[name] = value
    inner["encoder" if attention == "self_attention" else "transformer"] = layers
    return {"language_model": inner}


def oldest_names(model):
    """The names of Megatron-LM 1.0 and 2.0."""
    return old_names(model, "attention")


def reordered(version, model):
    """Version 0: [3, heads, d]. Version 1: [heads, d, 3]. Since 2: [heads, 3, d]."""
    found = dict(model)
    for name, value in model.items():
        if "linear_qkv" in name:
            heads = value.view(-1, 3, GPT.head_dim, *value.shape[1:])
            swapped = heads.transpose(0, 1) if version == 0 else heads.transpose(1, 2)
            found[name] = swapped.reshape(value.shape)
    return found


SINKHORN = dict(num_experts=4, moe_router_load_balancing_type="sinkhorn")
UNEVEN = dict(stages=LAYOUTS["uneven stages"], tp=2)
ONE = dict(stages=LAYOUTS["one file"])


@in_one_test(
    "rename, settings, how",
    [
        *itertools.product([te_names, old_names, oldest_names], [LLAMA, {}], [UNEVEN]),
        *((partial(reordered, version), {}, {**ONE, "version": version}) for version in (0, 1.0)),
        (experts_as(one_by_one), EXPERTS, {**ONE, "tp": 2, "ep": 2}),
        (experts_as(grouped), EXPERTS, {**UNEVEN, "tp": 1}),
        (experts_as(grouped), EXPERTS, {**ONE, "ep": 4}),
        (experts_as(in_one_matrix), EXPERTS, {**UNEVEN, "ep": 2}),
        (experts_as(in_one_matrix), EXPERTS, {**ONE, "ep": 4}),
        (experts_as(grouped), {**LLAMA, **SINKHORN}, ONE),
    ],
)
def test_the_forms_of_every_release_are_read(rename, settings, how, tmp_path):
    config, root = tiny_config(**{"num_layers": 5, **settings}), Path(mkdtemp(dir=tmp_path))
    assert check(root, save(root, config, rename=rename, **how)).model == config


def test_experts_that_are_split_otherwise_or_missing_are_refused(tmp_path):
    def without_number_3(name, experts):
        return (
            (one.replace("experts.3.", "experts.5."), part)
            for one, part in one_by_one(name, experts)
        )

    config = tiny_config(**EXPERTS)
    for message, form, args in (
        (r"a chunk of .*linear_fc\d\.weight lies outside", without_number_3, {}),
        ("split over 8 TP ranks.*torch_dist", one_by_one, dict(expert_tensor_parallel_size=8)),
    ):
        root = Path(mkdtemp(dir=tmp_path))
        save(root, config, LAYOUTS["one file"], rename=experts_as(form), **args)
        with pytest.raises(InputError, match=message):
            legacy_source(root)


def test_a_release_and_the_folder_of_an_iteration_are_found(tmp_path):
    weights = save(tmp_path, tiny_config(**LLAMA), LAYOUTS["one file"])
    check(tmp_path / "iter_0000040", weights)
    (tmp_path / "iter_0000040").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    check(tmp_path, weights)


def test_arguments_of_older_releases_are_read(tmp_path):
    """Padding stays if the size of the vocabulary is not known."""
    config = tiny_config(**LLAMA, position_embedding_type="rope")
    more = dict(norm_epsilon=None, layernorm_epsilon=1e-5, position_embedding_type=None)
    more |= dict(use_rotary_position_embeddings=True, disable_bias_linear=True, vocab_size=None)
    more |= dict(max_position_embeddings=None, seq_length=17, num_query_groups=4)
    save(tmp_path, config, LAYOUTS["one file"], add_bias_linear=None, **more)
    described = legacy_source(tmp_path)
    assert described.model == config and described.true_vocab_size == PADDED
    assert any(f"{PADDED} rows" in note for note in described.notes)


@in_one_test(
    "change, message",
    [
        (dict(num_experts=8), r"lacks decoder\.layers\.0\.mlp\.experts"),
        (dict(moe_latent_size=8, num_experts=8), "moe_latent_size = 8"),
        (dict(softmax_scale=0.5), "softmax_scale = 0.5"),
        (dict(use_mup=True), "use_mup = True, which cannot be converted: muP"),
        (dict(num_layers=None), "missing field num_layers"),
        (dict(num_layers=2**40), "num-layers"),
        (dict(hidden_size=[[]]), "hidden_size"),
        (dict(ffn_hidden_size=44), r"linear_fc\d.*\(88, 32\)|\(80, 32\).*\(88, 32\)"),
        (dict(position_embedding_type="rope"), "holds embedding.position_embeddings"),
        (dict(position_embedding_type="yarn"), "yarn"),
        (dict(tensor_model_parallel_size=2), "TP 2 x PP 1 x EP 1 ranks, and lacks mp_rank_01/"),
    ],
)
def test_arguments_that_do_not_fit_are_one_clear_error(change, message, tmp_path):
    config, root = tiny_config(**LLAMA), Path(mkdtemp(dir=tmp_path))
    save(root, config, LAYOUTS["one file"], **change)
    with pytest.raises(InputError, match=message):
        list(map(legacy_source(root).read, weights_of(config)))


def test_missing_and_damaged_files_are_one_clear_error(tmp_path):
    def refused(message, path=tmp_path):
        with pytest.raises(InputError, match=message):
            legacy_source(path)

    refused("no such directory", tmp_path / "nowhere")
    refused("holds no checkpoint of the format megatron")
    save(tmp_path, tiny_config(**LLAMA), LAYOUTS["one file"], tp=2)
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    for text, message in (("x", "expected an iteration"), ("41", "iter_0000041 does not exist")):
        pointer.write_text(text)
        refused(message)
    pointer.write_text("40")
    file = tmp_path / "iter_0000040" / "mp_rank_01" / "model_optim_rng.pt"
    whole = file.read_bytes()
    for contents in (whole[:-100], b""):
        file.write_bytes(contents)
        refused("mp_rank_01")
    for value, message in (
        ([1], "holds 0 model chunks"),
        ({"model": {}}, "hold 1024 of its 2048 numbers"),
        ({"model": {WORDS: 1}}, "no plain tensor"),
        ({"model": [1]}, "cannot be read"),
    ):
        torch.save(value, file)
        refused(message)


def test_states_that_cannot_be_mapped_leave_the_weights(tmp_path):
    config = tiny_config(**LLAMA)
    weights = weights_of(config)
    source = WeightSource(
        model=config,
        true_vocab_size=V,
        dtypes=dict.fromkeys(weights, torch.float32),
        read=lambda name: weights[name.partition("/")[0]],
        state_keys=("exp_avg", "exp_avg_sq", "master"),
        num_updates=3,
    )
    write_legacy(source, tmp_path / "run")
    path = tmp_path / "run/iter_0000000/mp_rank_00/model_optim_rng.pt"

    def saved(change=lambda optimizer: optimizer):
        value = torch.load(saved_by_run, weights_only=False)
        torch.save({**value, "optimizer": change(value["optimizer"])}, path)
        return check(tmp_path / "run", weights)

    saved_by_run = path.rename(tmp_path / "good.pt")
    # A folder beyond the ranks of the run is another run's, and changes nothing.
    (path.parents[1] / "mp_rank_01").mkdir()
    torch.save({"model": {}}, path.parents[1] / "mp_rank_01" / path.name)
    good = saved()
    assert (good.state_keys, good.num_updates) == (source.state_keys, 3)
    for name, whole in weights.items():
        assert all(torch.equal(good.read(f"{name}/{key}"), whole) for key in good.state_keys)

    def swapped(found):
        first = found["fp32_from_fp16_params"][0]
        first[1], first[5] = first[5], first[1]
        return found

    def shorter(found):
        found["optimizer"]["param_groups"][1]["params"].pop()
        return found

    def stateless(found):
        found["optimizer"]["state"] = {}
        return found

    for change, message in (
        (swapped, "float32 weights"),
        (shorter, "one optimizer"),
        (stateless, "one optimizer"),
        (lambda _: [{}, {}], "one optimizer"),
        (lambda _: None, "no optimizer states"),
    ):
        found = saved(change)
        assert found.state_keys == () and message in found.notes[0], found.notes
    (path.parent / "distrib_optim.pt").touch()
    assert "distrib_optim.pt does not name" in saved().notes[0]
