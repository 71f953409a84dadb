"""Sources that somebody has crafted: each is one clear error, in time, and no target appears."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config.hf_config import from_hf
from tests.convert.megatron.test_pickles import archive
from tests.support.conversions import WORDS, converted, rewrite, save_tokenizer, saved_peer

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

MODULUS = 2**61 - 1  # of Python's hash of whole numbers


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return edited


def tokenizer(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        save_tokenizer(folder)
        edit("tokenizer.json", change)(folder)

    return edited


def secret(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("/proc/self/environ")


def text(name: str, content: bytes) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        save_tokenizer(folder)
        (folder / name).write_bytes(content)

    return written


def one_id(values: Any) -> None:
    values["model"]["vocab"] = dict.fromkeys(WORDS, 3)


def rotary(**values: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda found: found["rope_parameters"].update(values))


def sizes(**values: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda found: found.update(values))


def weight(value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = value

    return lambda folder: rewrite(folder, change)


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to a secret": (secret, "tokenizer.json: is no regular file, but a link out of"),
    "no JSON": (text("tokenizer_config.json", b"SECRET=1"), "not a tokenizer that can be read"),
    "bytes": (text("chat_template.jinja", b"A=1\0B=2\0"), "it is no text"),
    "no pairs": (text("merges.txt", b"root:x:0:0\n"), "line 1 is no pair of words"),
    "no object": (text("generation_config.json", b"[]"), "must be an object"),
    "one id": (tokenizer(one_id), "have one id, 3"),
    "an id beyond": (
        tokenizer(lambda found: found["model"]["vocab"].update(late=61)),
        "the id of 'late' must be a whole number from 0 to 60 (got 61)",
    ),
    "an added id beyond": (
        tokenizer(
            lambda found: found["added_tokens"].append(
                dict(id=99, content="<x>", single_word=False, lstrip=False, rstrip=False)
                | dict(normalized=False, special=True)
            )
        ),
        "the id of '<x>' must be",
    ),
    "an unknown rotary key": (rotary(mystery=1), "has the unknown key mystery"),
    "nested rotary keys": (
        rotary(full_attention={"rope_theta": 1e6}),
        "has the unknown key full_attention",
    ),
    "a part of a head": (rotary(partial_rotary_factor=0.5), "the whole head is rotated"),
    "an infinite base": (rotary(rope_theta=float("inf")), "rope_theta must be a whole number"),
    "a base of 400 digits": (rotary(rope_theta=10**400), "beyond 64 bits"),
    "NaN": (weight(float("nan")), "decoder.final_layernorm.weight holds NaN or infinity"),
    "infinity": (weight(float("-inf")), "decoder.final_layernorm.weight holds NaN or infinity"),
    "many layers": (sizes(num_hidden_layers=65536), "describes 65536 layers, and the files"),
    "a token id of text": (sizes(eos_token_id="</s>"), "eos_token_id must be a whole number"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_crafted_folder_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = CASES[case]
    saved_peer("llama", tmp_path / "theirs")
    change(tmp_path / "theirs")
    capsys.readouterr()
    began = time.process_time()
    assert converted(tmp_path / "theirs", tmp_path / "ours", "hf megatron-lite") == 2
    assert time.process_time() - began < 5.0
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and len(error) <= 1024
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_links_into_the_blobs_of_a_cache_are_followed(tmp_path: Path) -> None:
    """As the cache of Hugging Face lays out a model."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    saved_peer("llama", snapshot)
    save_tokenizer(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert converted(snapshot, tmp_path / "ours", "hf megatron-lite") == 0
    (blobs / "0").unlink()
    (blobs / "0").symlink_to("/etc/hostname")
    assert converted(snapshot, tmp_path / "again", "hf megatron-lite") == 2


def test_the_ids_of_special_tokens_survive_the_way_there_and_back(tmp_path: Path) -> None:
    saved_peer("llama", tmp_path / "theirs")
    save_tokenizer(tmp_path / "theirs")
    ids = dict(bos_token_id=4, eos_token_id=[0, 2], pad_token_id=None)
    sizes(**ids)(tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text('{"eos_token_id": [0, 2], "top_k": 7}')
    assert converted(tmp_path / "theirs", tmp_path / "ours", "hf megatron-lite") == 0
    assert converted(tmp_path / "ours", tmp_path / "again", "megatron-lite hf") == 0
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert {key: config[key] for key in ids} == ids
    for folder in ("theirs", "again"):
        content = (tmp_path / folder / "generation_config.json").read_text()
        assert json.loads(content) == {"eos_token_id": [0, 2], "top_k": 7}
    assert not (tmp_path / "again/token_ids.json").exists()


def test_a_known_rotary_object_is_read_in_every_form() -> None:
    sizes = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    config = dict(model_type="llama", max_position_embeddings=8, vocab_size=9, **sizes)
    for parameters in (
        {"rope_theta": 500.0, "rope_type": "default"},
        {"rope_theta": 500, "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
    ):
        assert from_hf({**config, "rope_parameters": parameters}).fields["rotary_base"] == 500


def saved_by_megatron(folder: Path, model: dict[str, Any], **args: Any) -> None:
    (folder / "mp_rank_00").mkdir(parents=True)
    known = dict(num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8)
    value = {"args": argparse.Namespace(**{**known, **args}), "model": model, "iteration": 10**12}
    torch.save(value, folder / "mp_rank_00" / "model_optim_rng.pt")


WORD = "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(tensor_model_parallel_size=2**20 - 1, pipeline_model_parallel_size=2**20 - 1), "PP"),
        (dict(num_layers=65536), "layers"),
        (dict(rotary_base=float("inf")), "rotary_base of its args has a value of no model"),
        (dict(rotary_base=1e300), "rotary_base of its args has a value of no model"),
        (dict(num_experts="x" * 10**6), "num_experts"),
    ],
)
def test_crafted_arguments_are_refused_at_once(
    args: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_by_megatron(tmp_path / "theirs", {WORD: torch.ones(8, 8)}, **args)
    began = time.process_time()
    assert converted(tmp_path / "theirs", tmp_path / "ours", "megatron hf") == 2
    assert time.process_time() - began < 5.0
    error = capsys.readouterr().err
    assert message in error and len(error) <= 1024 and not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "keys",
    [
        [(MODULUS * (i + 1)).to_bytes(10, "little") for i in range(50_000)],
        [(i << 40).to_bytes(8, "little") for i in range(50_000)],
    ],
    ids=["equal hashes", "equal probes"],
)
@pytest.mark.parametrize("as_tuple", [b"", b"\x85"], ids=["numbers", "tuples"])
def test_keys_whose_hashes_collide_take_no_quadratic_time(
    keys: list[bytes], as_tuple: bytes, tmp_path: Path
) -> None:
    """Plain dicts of these keys take minutes."""
    items = b"".join(b"\x8a" + bytes([len(key)]) + key + as_tuple + b"N" for key in keys)
    folder = tmp_path / "theirs" / "mp_rank_00"
    folder.mkdir(parents=True)
    archive(folder / "model_optim_rng.pt", b"\x80\x02}(" + items + b"u.")
    began = time.process_time()
    assert converted(tmp_path / "theirs", tmp_path / "ours", "megatron hf") == 2
    assert time.process_time() - began < 5.0


def test_one_dict_at_many_places_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner: dict[str, Any] = {WORD: torch.ones(8, 8)}
    for _ in range(6):
        inner = {f"a{number}": inner for number in range(100)}
    saved_by_megatron(tmp_path / "theirs", inner)
    assert converted(tmp_path / "theirs", tmp_path / "ours", "megatron hf") == 2
    assert "a state dict is at two places" in capsys.readouterr().err


def test_every_byte_of_a_zip_may_be_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offsets and lengths in the directory of the archive above all: an error or the same bytes."""
    saved_by_megatron(tmp_path / "theirs", {WORD: torch.ones(8, 8)})
    path = tmp_path / "theirs" / "mp_rank_00" / "model_optim_rng.pt"
    whole = path.read_bytes()
    start = whole.index(b"PK\x01\x02")
    for place in range(start, len(whole), 3):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            assert converted(tmp_path / "theirs", tmp_path / "ours", "megatron hf") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_iteration_that_no_run_reaches_and_integer_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    saved_peer("gpt2", tmp_path / "theirs")
    assert converted(tmp_path / "theirs", tmp_path / "legacy", "hf megatron") == 0
    path = tmp_path / "legacy" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        value = torch.load(path, weights_only=True)
    for change, message in (
        (dict(iteration=10**12), "its iteration must be a whole number from 0 to"),
        (
            dict(
                model={name: one.int() for name, one in value["model"].items() if one is not None}
            ),
            "torch.int32, and only",
        ),
    ):
        torch.save({**value, **change}, path)
        assert converted(tmp_path / "legacy", tmp_path / "ours", "megatron hf") == 2
        assert message in capsys.readouterr().err and not (tmp_path / "ours").exists()
