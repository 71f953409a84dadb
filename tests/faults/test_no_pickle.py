"""A pickle in the place of any file that the program reads does not run: the file is refused, or
not used."""

import io
import os
import pickle
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron_lite.checkpointing.lock import LOCK
from megatron_lite.checkpointing.metadata import MANIFEST
from megatron_lite.checkpointing.start import step_fault
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.data.datasets import build_datasets
from megatron_lite.tools import (
    generate,
    plot_memory,
    preprocess_data,
    train_tokenizer,
    translate_recompute,
)
from tests.support.checkpoints import sign
from tests.support.commands import status_of
from tests.support.corpora import written
from tests.support.runs import run_to_end, tiny_run
from tests.support.saves import saving_run


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def as_torch_file(mark):
    buffer = io.BytesIO()
    torch.save({"weight": Payload(mark)}, buffer)
    return buffer.getvalue()


def as_numpy_file(mark):
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


FORMS = (lambda mark: pickle.dumps(Payload(mark)), as_torch_file, as_numpy_file)
SAMPLE = "--load {} --prompt 1 --distributed-backend gloo --max-new-tokens 1"


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "it ran"


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize("first", range(len(FORMS)))
def test_in_a_checkpoint(tmp_path, mark, first):
    """Signed or not, in the place of every file, by training and by sampling. The forms take turns:
    the weekly run has each of them in each place."""
    steps = tmp_path / "steps"
    run_to_end(saving_run(steps, 1, load=False))
    step = steps / "iter_0000001"
    (step / "model.pt").write_bytes(as_torch_file(mark))  # beside the others
    for number, path in enumerate(sorted(step.iterdir())):
        form, good = FORMS[(first + number) % len(FORMS)], path.read_bytes()
        manifest = (step / MANIFEST).read_bytes()
        for signed in (False, True):
            path.write_bytes(form(mark))
            if signed and path.name != MANIFEST:
                sign(step)
            if path.name != "model.pt":
                with pytest.raises(InputError, match=path.name):
                    run_to_end(tiny_run(load=str(steps)))
            generate.main(SAMPLE.format(steps).split())
            path.write_bytes(good)
            (step / MANIFEST).write_bytes(manifest)
    assert step_fault(step) is None and not mark.exists()
    for name in (LATEST, LOCK):
        (steps / name).write_bytes(FORMS[first](mark))
    run_to_end(saving_run(steps, 2))
    assert not mark.exists()


def test_in_data_and_in_its_cache(tmp_path, mark):
    prefix = written(tmp_path / "text", ([number] * 37 for number in range(30)))
    config = tiny_run(
        train_iters=1,
        eval_iters=0,
        data_path=(prefix,),
        data_cache_path=str(tmp_path / "cache"),
        mock_data=False,
    )
    run_to_end(config)
    arrays = sorted((tmp_path / "cache").rglob("*.*"))
    assert {path.suffix for path in arrays} == {".npy", ".lock"}
    for path in filter(Path.is_file, arrays):
        for form in FORMS if path.suffix == ".npy" else FORMS[:1]:
            path.write_bytes(form(mark))
            run_to_end(config)
    for kind, form in product((".bin", ".idx"), FORMS):
        good = Path(prefix + kind).read_bytes()
        Path(prefix + kind).write_bytes(form(mark))
        with pytest.raises(InputError, match=f"text{kind}"):
            build_datasets(config.data, vocab_size=99, seed=1, num_samples=(4, 0, 0))
        Path(prefix + kind).write_bytes(good)
    assert not mark.exists()


TRAIN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 1 "
    "--max-position-embeddings 8 --eval-iters 0 --micro-batch-size 1 --lr 1e-3 "
    "--distributed-backend gloo "
)
IDS, MOCK = "--vocab-size 9 ", "--mock-data "
HF, TEXT = "--tokenizer-type HuggingFaceTokenizer ", "--input {0} --output-prefix {1} "
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file {0} --merge-file {0}"
COMMANDS = [
    (pretrain_gpt.main, TRAIN + IDS + MOCK + "--config-json {0}"),
    (pretrain_gpt.main, TRAIN + MOCK + HF + "--tokenizer-model {0}"),
    (pretrain_gpt.main, TRAIN + MOCK + GPT2),
    (pretrain_gpt.main, TRAIN + IDS + MOCK + "--load {0}"),
    (pretrain_gpt.main, TRAIN + IDS + "--data-path {0}"),
    (plot_memory.main, "{0} --output {1}.svg"),
    (translate_recompute.main, "--from deepspeed --json {0}"),
    (train_tokenizer.main, "--input {0} --output {1}"),
    (preprocess_data.main, TEXT + IDS + "--tokenizer-type NullTokenizer"),
    (preprocess_data.main, TEXT + HF + "--tokenizer-model {0}"),
    (generate.main, "--load {0} --prompt 1"),
]


@pytest.mark.parametrize("main, words", COMMANDS)
def test_in_the_files_of_a_command(tmp_path, mark, main, words):
    file = tmp_path / "tokenizer.json"
    for form in FORMS:
        file.write_bytes(form(mark))
        assert status_of(main, words.format(file, tmp_path / "out").split()) == 2
        assert not mark.exists()
