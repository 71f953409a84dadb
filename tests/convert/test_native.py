"""Conversions of this project's own checkpoints, and runs that go on from conversions."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_lite import __main__ as command
from megatron_lite.checkpointing.metadata import Metadata
from megatron_lite.checkpointing.start import find_step, step_fault
from megatron_lite.convert import native
from megatron_lite.tools import generate
from tests.support.checkpoints import flip_bit, sign
from tests.support.conversions import (
    converted,
    refusal,
    rewrite,
    save_tokenizer,
    saved_peer,
    weights_in,
)
from tests.support.hf import PEERS
from tests.support.programs import run_program
from tests.support.rank_faults import NO_DROPOUT
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

FEW = ["--max-new-tokens", "2", "--distributed-backend", "gloo"]


def weights_only(step):
    """Turns a checkpoint into one without optimizer states and streams, as conversions write."""
    for path in (*step.glob("optimizer_*"), *step.glob("rng_*")):
        path.unlink()
    metadata = replace(Metadata.read(step), missing=("optimizer", "rng"))
    (step / "metadata.json").write_text(metadata.to_json())
    sign(step)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three iterations with Adam, saved."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_to_end(tiny_run(save=folder, train_iters=3))
    return folder


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_run_goes_on_from_converted_optimizer_states(optimizer, tmp_path):
    """Without dropout the run is the one that goes on from the original."""
    still = dict(NO_DROPOUT, optimizer=optimizer)
    run_to_end(tiny_run(**still, save=tmp_path / "run", train_iters=3))
    layout = ("--tensor-model-parallel-size", "2")
    assert converted(tmp_path, "megatron-lite run -> megatron-lite split", *layout) == 0
    for name, load in (("first", "run"), ("second", "split")):
        run_to_end(tiny_run(**still, load=tmp_path / load, save=tmp_path / name, train_iters=5))
    assert converted(tmp_path, "megatron-lite run -> megatron out") == 2 * (optimizer == "muon")
    first, second = (step_bytes(tmp_path / name, 5) for name in ("first", "second"))
    assert first.pop("rng_00000.safetensors") and second.pop("rng_00000.safetensors")
    assert len(first) == 2 and first == second


def test_a_step_of_weights_alone_starts_a_run_with_a_notice(trained, tmp_path, capsys):
    """The run is the one of --no-load-optim --no-load-rng with the whole step."""
    shutil.copytree(trained, tmp_path / "weights")
    step = tmp_path / "weights" / "iter_0000003"
    weights_only(step)
    assert step_fault(step) is None
    for name, load, more in (
        ("whole", trained, dict(no_load_optim=True, no_load_rng=True)),
        ("weights", tmp_path / "weights", {}),
    ):
        capsys.readouterr()
        run_to_end(tiny_run(load=load, **more, train_iters=5, metrics=tmp_path / f"{name}.jsonl"))
    told = capsys.readouterr().out
    assert f"{step} holds no optimizer states (it was converted): they start from zero" in told
    assert (
        f"{step} holds no random-number streams (it was converted): they start from --seed" in told
    )
    assert rows(tmp_path / "whole.jsonl") == rows(tmp_path / "weights.jsonl")


def test_a_damaged_checkpoint_is_not_converted(trained, tmp_path):
    """Nor one whose metadata hides a missing file."""

    def refused(message):
        assert message in refusal(tmp_path, "megatron-lite run -> megatron-lite out")
        assert not (tmp_path / "out").exists()

    shutil.copytree(trained, tmp_path / "run")
    step = tmp_path / "run" / "iter_0000003"
    (step / "rng_00000.safetensors").unlink()
    sign(step)
    refused("rng_00000.safetensors is not in the manifest")
    values = json.loads((step / "metadata.json").read_text())
    (step / "metadata.json").write_text(json.dumps({**values, "missing": ["weights"]}))
    sign(step)
    refused("missing must name parts of optimizer, rng")
    flip_bit(next(step.glob("model_*")), 20_000)
    refused("its checksum is not the one in manifest.json")


# --- the tokenizer ---


def test_a_run_stores_its_tokenizer_and_tools_need_no_other(tmp_path, monkeypatch, capsys):
    """The original files are gone, and the directory has moved."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(tmp_path / "tokenizer")
    run_to_end(
        tiny_run(
            save=tmp_path / "run",
            train_iters=1,
            **NO_DROPOUT,
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=tmp_path / "tokenizer",
            vocab_size=9,
            make_vocab_size_divisible_by=128,
        )
    )
    stored = {path.name: path.read_bytes() for path in (tmp_path / "tokenizer").iterdir()}
    shutil.rmtree(tmp_path / "tokenizer")
    (tmp_path / "run").rename(tmp_path / "moved")
    step = tmp_path / "moved" / "iter_0000001"
    assert {name: (step / name).read_bytes() for name in stored} == stored
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert generate.main(["--load", "../moved", "--prompt", "to be", "--greedy", *FEW]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("to be")
    assert converted(Path(), "megatron-lite ../moved -> hf out") == 0
    assert {name: (Path("out") / name).read_bytes() for name in stored} == stored
    flip_bit(step / "tokenizer.json", 100)
    assert "tokenizer.json: its checksum is not the one" in str(step_fault(step))


# --- a checkpoint of Hugging Face, in training ---


def test_weights_of_two_dtypes_keep_them(tmp_path):
    pytest.importorskip("transformers")
    saved_peer("llama", tmp_path / "theirs")

    def in_two(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor if "norm" in name else tensor.bfloat16()

    rewrite(tmp_path / "theirs", in_two)
    assert converted(tmp_path, "hf theirs -> megatron-lite ours") == 0
    saved, _ = find_step(str(tmp_path / "ours"))
    assert saved.config.training.bf16
    dtypes = {name: tensor.dtype for name, tensor in weights_in(saved.path).items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert dtypes["decoder.final_layernorm.weight"] == torch.float32


main = partial(command.main, started="/usr/bin/megatron-lite")
SHORT = ["--train-iters", "2", "--eval-iters", "0", "--distributed-backend", "gloo"]


def test_a_converted_model_trains_on_and_generates(tmp_path, monkeypatch):
    """A small Llama in bfloat16, on two ranks, with the tokenizer of the source."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    PEERS["llama"]().to(torch.bfloat16).save_pretrained("theirs")
    save_tokenizer(Path("theirs"))
    text = {"text": "to be or not to be " * 40}
    Path("text.jsonl").write_text(f"{json.dumps(text)}\n" * 200)
    way = ["--from", "hf", "--to", "megatron-lite", "--load", "theirs", "--save", "ours"]
    assert main(["convert", *way, "--tensor-model-parallel-size", "2"]) == 0
    files = ["--input", "text.jsonl", "--output-prefix", "text", "--append-eod"]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "theirs"]
    assert main(["preprocess", *files, *tokenizer]) == 0
    train = (
        "train --config-json ours/iter_0000000/config.json --load ours --save ours-trained "
        "--data-path text_text_document --lr 1e-5"
    )
    trained = run_program(*train.split(), *SHORT, ranks=2, main=main)
    assert trained.returncode == 0, trained.stderr
    config = find_step("ours-trained")[0].config
    assert config.training.bf16 and config.model == find_step("ours")[0].config.model
    words = ["generate", "--load", "ours", "--prompt", "Once upon a time"]
    generated = run_program(*words, *FEW, main=main)
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith("Once upon a time")


def test_shards_of_some_bytes_are_read_as_one_checkpoint(trained, tmp_path, monkeypatch):
    """Each is written as a pipeline rank, with the optimizer states of its parameters. A run that
    goes on keeps the ids of special tokens, also without files of a tokenizer."""
    source = replace(native.source(trained), token_ids={"eos_token_id": 7})
    monkeypatch.setattr("megatron_lite.convert.weights.SHARD_BYTES", 20_000)
    native.write(source, tmp_path / "split")
    again = native.source(tmp_path / "split")
    assert len(list(tmp_path.glob("split/*/optimizer_pp*"))) > 3
    assert again.state_keys == source.state_keys and again.progress == source.progress
    for name in source.sizes:
        assert torch.equal(again.read(name), source.read(name))
    run = tiny_run(load=tmp_path / "split", save=tmp_path / "on", train_iters=4)
    assert run_to_end(run).progress.iteration == 4
    assert native.source(tmp_path / "on").token_ids == source.token_ids
