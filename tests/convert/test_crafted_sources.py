"""Sources that somebody has crafted: each is one clear error, in time, and no target appears."""

import argparse
import json

import pytest
import torch

from megatron_lite.tools import generate
from tests.convert.megatron.test_pickles import archive
from tests.support.commands import fault_of
from tests.support.conversions import (
    WORDS,
    converted,
    refusal,
    save_tokenizer,
    saved_peer,
    there_and_back,
)

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

MODULUS = 2**61 - 1  # of Python's hash of whole numbers


def test_links_into_the_blobs_of_a_cache_are_followed(tmp_path):
    """As the cache of Hugging Face lays out a model."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    saved_peer("llama", snapshot)
    save_tokenizer(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert converted(tmp_path, f"hf {snapshot} -> megatron-lite ours") == 0
    (blobs / "0").unlink()
    (blobs / "0").symlink_to("/etc/hostname")
    assert converted(tmp_path, f"hf {snapshot} -> megatron-lite again") == 2


def test_the_ids_of_special_tokens_survive_the_way_there_and_back(tmp_path):
    saved_peer("llama", tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    ids = dict(bos_token_id=4, eos_token_id=[0, 2], pad_token_id=None)
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **ids}))
    (tmp_path / "theirs/generation_config.json").write_text('{"eos_token_id": [0, 2], "top_k": 7}')
    there_and_back(tmp_path)
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert {key: config[key] for key in ids} == ids
    for folder in ("theirs", "again"):
        content = (tmp_path / folder / "generation_config.json").read_text()
        assert json.loads(content) == {"eos_token_id": [0, 2], "top_k": 7}
    assert not (tmp_path / "again/token_ids.json").exists()


def test_a_token_may_be_added_beyond_the_ids_of_the_model(tmp_path):
    """As the image's in the tokenizer of Gemma 3 1B."""
    saved_peer("llama", tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs", [*WORDS, *map(str, range(5, 61))], ["<beyond>"])
    there_and_back(tmp_path)
    error = fault_of(generate.main, ["--load", str(tmp_path / "ours"), "--prompt", "to<beyond>"])
    assert "--prompt has the token 61, and the model 61 ids: leave out '<beyond>'" in error


def saved_by_megatron(folder, model, **args):
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    known = dict(num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8)
    value = {"args": argparse.Namespace(**{**known, **args}), "model": model, "iteration": 10**12}
    torch.save(value, path)
    return path


DEEP = []
for _ in range(60):  # 2^60 values, if anybody walked through them
    DEEP = [DEEP, DEEP]
WORD = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    "args, message",
    [
        (dict(tensor_model_parallel_size=2**20 - 1, pipeline_model_parallel_size=2**20 - 1), "PP"),
        (dict(num_layers=65536), "layers"),
        (dict(rotary_base=1e300), "--rotary-base must be at most"),
        (dict(num_experts="x" * 10**6), "num_experts"),
        (dict(hidden_size=DEEP), "hidden_size: expected int, got 'a list'"),
    ],
)
def test_crafted_arguments_are_refused_at_once(args, message, tmp_path):
    saved_by_megatron(tmp_path / "theirs", {WORD: torch.ones(8, 8)}, **args)
    error = refusal(tmp_path, "megatron theirs -> hf ours")
    assert message in error and len(error) <= 1024 and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("as_tuple", [b"", b"\x85"])
def test_keys_whose_hashes_collide_take_no_quadratic_time(as_tuple, tmp_path):
    """Plain dicts of these keys, of equal hashes or equal probes, take minutes."""
    folder = tmp_path / "theirs" / "mp_rank_00"
    folder.mkdir(parents=True)
    for factor in (MODULUS, 1 << 40):
        keys = ((factor * number).to_bytes(10, "little") for number in range(1, 50_000))
        items = b"".join(b"\x8a\x0a" + key + as_tuple + b"N" for key in keys)
        archive(folder / "model_optim_rng.pt", b"\x80\x02}(" + items + b"u.")
        refusal(tmp_path, "megatron theirs -> hf ours")


def test_one_dict_at_many_places_is_refused(tmp_path):
    inner = {WORD: torch.ones(8, 8)}
    for _ in range(6):
        inner = {f"a{number}": inner for number in range(100)}
    saved_by_megatron(tmp_path / "theirs", inner)
    assert "a state dict is at two places" in refusal(tmp_path, "megatron theirs -> hf ours")


def test_every_byte_of_a_zip_may_be_wrong(tmp_path):
    """Offsets and lengths in the directory of the archive above all: an error or the same bytes."""
    path = saved_by_megatron(tmp_path / "theirs", {WORD: torch.ones(8, 8)})
    whole = path.read_bytes()
    start = whole.index(b"PK\x01\x02")
    for place in range(start, len(whole), 7):
        for value in (0x00, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            assert "Traceback" not in refusal(tmp_path, "megatron theirs -> hf ours")


def test_an_iteration_that_no_run_reaches_and_integer_weights_are_refused(tmp_path):
    saved_peer("gpt2", tmp_path / "theirs")
    assert converted(tmp_path, "hf theirs -> megatron legacy") == 0
    path = tmp_path / "legacy" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        value = torch.load(path, weights_only=True)
    for change, message in (
        (dict(iteration=10**12), "iteration must be a whole number from 0 to"),
        (
            dict(
                model={name: one.int() for name, one in value["model"].items() if one is not None}
            ),
            "torch.int32, and only",
        ),
    ):
        torch.save({**value, **change}, path)
        assert message in refusal(tmp_path, "megatron legacy -> hf ours")
        assert not (tmp_path / "ours").exists()
