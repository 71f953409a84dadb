"""A conversion holds one file at a time."""

from dataclasses import replace
from functools import partial

import torch

from benchmarks.data import anonymous_bytes
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert import hf, native
from megatron_lite.convert.megatron import legacy
from megatron_lite.convert.weights import WeightSource, parameter_specs

MIB = 2**20
MODEL = ModelConfig(
    num_layers=24,
    hidden_size=256,
    num_attention_heads=8,
    ffn_hidden_size=512,
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def ones(model=MODEL):
    """A source of 60 MiB, whose largest tensor has 1 MiB."""
    specs = parameter_specs(model, 512)
    dtypes = dict.fromkeys(specs, torch.float32)
    return WeightSource(
        model=model,
        true_vocab_size=512,
        dtypes=dtypes,
        read=lambda name: torch.ones(specs[name].global_shape),
    )


def peak_bytes(source, write, path):
    """Returns by how much the process grew while it converted."""
    before, most, given = anonymous_bytes("self"), 0, source()

    def read(name):
        nonlocal most
        tensor = given.read(name)
        most = max(most, anonymous_bytes("self"))
        return tensor

    write(replace(given, read=read), path)
    return most - before


def test_the_peak_is_a_few_files_and_not_the_model(tmp_path, monkeypatch):
    """The tensors of a file and their copies: files of 2 MiB, for Megatron of 15 MiB."""
    theirs, ours, megatron = (tmp_path / name for name in ("theirs", "ours", "megatron"))
    # The first conversion of a process loads parts of torch, which stay.
    one_layer = ones(replace(MODEL, num_layers=1))
    hf.write(one_layer, tmp_path / "first")
    legacy.write(one_layer, tmp_path / "second")
    monkeypatch.setattr("megatron_lite.convert.weights.SHARD_BYTES", 2 * MIB)
    split = dict(tp_size=2, pp_size=2)
    peaks = [
        peak_bytes(ones, hf.write, theirs),
        peak_bytes(lambda: hf.source(theirs), partial(native.write, **split), ours),
    ]
    of_a_rank = peak_bytes(lambda: native.source(ours), partial(legacy.write, **split), megatron)
    peaks.append(peak_bytes(lambda: legacy.source(megatron), hf.write, tmp_path / "again"))
    assert max(peaks) < 15 * MIB and of_a_rank < 25 * MIB, (peaks, of_a_rank)
