"""torch_dist checkpoints as torch's own writer makes them, and damaged ones."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_lite.config.checks import InputError
from megatron_lite.convert.megatron.dist import source as dist_source
from megatron_lite.convert.megatron.dist import write
from tests.convert.megatron.test_legacy_layouts import (
    EXPERTS,
    LLAMA,
    V,
    args_of,
    te_names,
    weights_of,
)
from tests.convert.megatron.test_pickles import Evil
from tests.support.models import tiny_config
from tests.support.pairs import in_one_test

CONFIG = tiny_config(**LLAMA)
WORDS = "embedding.word_embeddings.weight"


def save(root, *, stacked=True, common=None, config=CONFIG, **more):
    """Writes the checkpoint with torch's writer. Returns the weights."""
    weights = weights_of(config)
    named = {
        name.replace(".mlp.experts.", ".mlp.experts.experts."): value
        for name, value in te_names(weights).items()
    }
    tensors = {}
    for name, value in named.items():
        _, _, rest = name.partition("decoder.layers.")
        _, _, own = rest.partition(".")
        if name.endswith("_extra_state"):
            continue
        if rest and stacked and f"decoder.layers.{own}" not in tensors:
            tensors[f"decoder.layers.{own}"] = torch.stack(
                [named[f"decoder.layers.{layer}.{own}"] for layer in range(5)]
            )
        elif not rest or not stacked:
            tensors[name] = value
    tensors = {**tensors, **{key.replace("__", "."): value for key, value in more.items()}}
    dcp.save(tensors, checkpoint_id=str(root), no_dist=True)
    values = dict(args=args_of(config, 1, 1), iteration=40, checkpoint_version=3.0)
    torch.save(common or values, root / "common.pt")
    (root / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return weights


@pytest.mark.parametrize(
    "stacked, settings",
    [(True, LLAMA), (False, LLAMA), (True, {**EXPERTS, "moe_layer_freq": 1}), (False, EXPERTS)],
)
def test_stacked_and_numbered_layers_are_read(stacked, settings, tmp_path):
    config = tiny_config(**settings)
    weights = save(tmp_path, stacked=stacked, config=config)
    source = dist_source(tmp_path)
    assert source.true_vocab_size == V and source.model == config
    assert "no optimizer states" in source.notes[0]
    for name, whole in weights.items():
        assert torch.equal(source.read(name), whole), name


def _with_place(**change):
    def changed(metadata):
        places = {key: replace(place, **change) for key, place in metadata.storage_data.items()}
        return replace(metadata, storage_data=places)

    return changed


def _with_one_place(metadata):
    place = next(iter(metadata.storage_data.values()))
    return replace(metadata, storage_data=dict.fromkeys(metadata.storage_data, place))


def _with_words(*size):
    def changed(metadata):
        tensors = dict(metadata.state_dict_metadata)
        tensors[WORDS] = replace(tensors[WORDS], size=torch.Size(size))
        return replace(metadata, state_dict_metadata=tensors)

    return changed


CHANGES = {
    "code": (lambda found: [found, Evil(print, "ran")], "asks for"),
    "a path outside": (_with_place(relative_path="../x"), "outside"),
    "a missing file": (_with_place(relative_path="x"), "cannot be read"),
    "a place behind the end": (_with_place(offset=10**9), "cannot be read"),
    "a negative place": (_with_place(offset=-1), "numbers of no checkpoint"),
    "another chunk's place": (_with_one_place, "in no file"),
    "no places": (lambda found: replace(found, storage_data={}), "in no file"),
    "a larger shape": (_with_words(70, 32), "hold 1952"),
    "an endless shape": (_with_words(2**60, 32), "numbers of no"),
    "a place that is no number": (_with_place(length=math.nan), "numbers of no checkpoint"),
    "another width": (_with_words(61, 33), "of its 2013"),
    "no metadata": (lambda found: [1, 2], "its description of tensors: cannot be read"),
}


@in_one_test("kind", CHANGES)
def test_a_damaged_or_malicious_metadata_is_one_clear_error(kind, tmp_path):
    root = Path(mkdtemp(dir=tmp_path))
    weights = save(root)
    change, message = CHANGES[kind]
    path = root / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    with pytest.raises(InputError, match=message):
        list(map(dist_source(root).read, weights))


def test_missing_and_cut_files_are_one_clear_error(tmp_path):
    with pytest.raises(InputError, match="holds no checkpoint of the format megatron-dist"):
        dist_source(tmp_path)
    weights = save(tmp_path)
    shard = next(tmp_path.glob("*.distcp"))
    whole = shard.read_bytes()
    for path, contents in ((tmp_path / ".metadata", b"\x80\x04"), (shard, whole[:-99])):
        kept = path.read_bytes()
        path.write_bytes(contents)
        with pytest.raises(InputError, match=path.name):
            list(map(dist_source(tmp_path).read, weights))
        path.write_bytes(kept)
    (tmp_path / "common.pt").unlink()
    with pytest.raises(InputError, match=r"common\.pt: cannot be read"):
        dist_source(tmp_path)


def test_parameters_that_the_model_lacks_or_the_file_lacks_are_named(tmp_path):
    save(tmp_path / "more", decoder__layers__mlp__router__weight=torch.ones(5, 2))
    with pytest.raises(InputError, match=r"holds decoder\.layers\.0\.mlp\.router\.weight"):
        dist_source(tmp_path / "more")
    common = dict(args=args_of(tiny_config(**{**LLAMA, "qk_layernorm": True}), 1, 1))
    save(tmp_path / "fewer", common=common)
    with pytest.raises(InputError, match=r"lacks decoder\.layers\.0\.self_attention\.k_layernorm"):
        dist_source(tmp_path / "fewer")
    common = dict(args=args_of(tiny_config(**{**LLAMA, "num_layers": 4}), 1, 1))
    save(tmp_path / "layers", common=common)
    with pytest.raises(InputError, match="the 4 layers"):
        dist_source(tmp_path / "layers")


@pytest.mark.parametrize("master", ["param", "fp32_param"])
def test_states_that_are_kept_by_parameter_are_read(master, tmp_path):
    """As the distributed optimizer saves them with --dist-ckpt-optim-fully-reshardable."""
    save(tmp_path / "weights")
    weights = dist_source(tmp_path / "weights")
    states = {}
    for number, theirs in enumerate((master, "exp_avg", "exp_avg_sq")):
        for name, whole in te_names(weights_of(CONFIG)).items():
            if not name.endswith("_extra_state"):
                states[f"optimizer.state.{theirs}.{name}".replace(".", "__")] = whole + number
    groups = [dict(wd_mult=1.0, step=7), dict(wd_mult=0.0, step=7)]
    common = dict(args=args_of(CONFIG, 1, 1), optimizer={"optimizer": {"param_groups": groups}})
    save(tmp_path / "states", common=common, **states)
    source = dist_source(tmp_path / "states")
    assert source.state_keys == ("exp_avg", "exp_avg_sq", "master")
    assert (source.num_updates, source.notes) == (7, ())
    # Those of the distributed optimizer are not by parameter.
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"
    others = ("chained_1.optimizer.other", "rng_state/shard_0", bucket)
    save(tmp_path / "others", **{one.replace(".", "__"): torch.ones(9) for one in others})
    found = dist_source(tmp_path / "others")
    assert found.state_keys == () and "kept by parameter" in found.notes[0]
    # An optimizer that holds itself is not walked through for ever.
    torch_file = tmp_path / "states" / "common.pt"
    optimizer = {}
    optimizer["optimizer"] = optimizer
    torch.save({**common, "optimizer": optimizer}, torch_file)
    assert "how many updates" in dist_source(tmp_path / "states").notes[0]
    for name in weights_of(CONFIG):
        for number, key in enumerate(("master", "exp_avg", "exp_avg_sq")):
            assert torch.equal(source.read(f"{name}/{key}"), weights.read(name) + number)


def test_an_older_torch_reads_what_a_newer_one_writes(tmp_path, monkeypatch):
    save(tmp_path / "from")
    kind = dcp.metadata.TensorProperties
    state = kind.__getstate__
    # torch 2.15 adds the strides
    monkeypatch.setattr(kind, "__getstate__", lambda properties: (*state(properties)[:5], None))
    write(dist_source(tmp_path / "from"), tmp_path / "to")
    (found,) = (tmp_path / "to").rglob(".metadata")
    assert pickle.loads(found.read_bytes()).state_dict_metadata[WORDS].properties.dtype
