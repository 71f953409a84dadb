"""A token id outside the vocabulary: one message with rank, iteration, file and document; every
rank stops; nothing is lost."""

import numpy as np
import pytest
import torch.distributed as dist

from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.data.datasets import build_datasets
from tests.support.changes import with_settings
from tests.support.corpora import written
from tests.support.rank_faults import SHAPES, in_shape, run_until_it_ends
from tests.support.ranks import run_ranks
from tests.support.runs import step_bytes, tiny_run, with_checkpoint

VOCABULARY = 99  # 98 and the one that NullTokenizer adds


def write_corpus(prefix):
    """Twelve documents of 40 tokens."""
    written(prefix, ((np.arange(40) * 7 + number * 11) % VOCABULARY for number in range(12)))


def corpus_config(prefix, shape, **settings):
    return in_shape(
        tiny_run(
            train_iters=8,
            eval_iters=0,
            data_path=(str(prefix),),
            split="100,0,0",
            mock_data=False,
            **settings,
        ),
        shape,
    )


def second_token(prefix, config, sample):
    """Returns the place of the second token of a sample in the file, and its document."""
    data = build_datasets(
        config.data, vocab_size=VOCABULARY, seed=config.training.seed, num_samples=(32, 0, 0)
    ).train
    ((_, (document, *_)),) = data.documents(sample).items()
    ids = np.fromfile(f"{prefix}.bin", np.uint16)[document * 40 : (document + 1) * 40]
    windows = np.lib.stride_tricks.sliding_window_view(ids, 4)
    start = int(np.argmax((windows == data[sample][:4]).all(1)))
    return document * 40 + start + 1, document


def write(prefix, place, token):
    """Puts a token there. Returns what stood there."""
    ids = np.memmap(f"{prefix}.bin", np.uint16, mode="r+")
    before, ids[place] = ids[place].copy(), token
    return before


def _run(rank, world_size, config, *bad):
    """bad: the place of a token that goes bad once every rank has opened the data."""

    def corrupt(_):
        if world_size > 1:
            dist.barrier()
        if bad and rank == 0:
            write(*bad, 60000)
        if world_size > 1:
            dist.barrier()

    trainer, error = run_until_it_ends(config, corrupt)
    return trainer.progress.iteration, error


@pytest.mark.runs
@pytest.mark.parametrize(
    "shape", ["pp2", "dp2", *("tp2", "alone", "cp2", "zero1-overlap", "fsdp2")]
)
def test_every_rank_stops_and_the_run_goes_on_from_its_checkpoint_once_the_data_are_whole(
    tmp_path, shape
):
    prefix, whole, parts = tmp_path / "data", tmp_path / "whole", tmp_path / "parts"
    write_corpus(prefix)
    config = corpus_config(prefix, shape, model=dict(attention_dropout=0.0))
    # read by the last data-parallel rank in iteration 6
    place, document = second_token(prefix, config, sample=4 * 5 + 3)
    good = int(np.fromfile(f"{prefix}.bin", np.uint16)[place])
    ranks = SHAPES[shape].ranks
    stopped = with_checkpoint(config, save=str(parts), save_interval=2)
    ended = run_ranks(_run, ranks, stopped, prefix, place)
    assert {iteration for iteration, _ in ended} == {5}
    (message,) = [str(error) for _, error in ended if type(error) is InputError]
    said = f"document {document} holds token id 60000, but the vocabulary has 99 ids"
    assert message.startswith("iteration 6, samples 23 to 23: ") and said in message
    assert (parts / LATEST).read_text() == "4"
    assert write(prefix, place, good) == 60000
    for folder, load in ((parts, str(parts)), (whole, None)):
        resumed = with_checkpoint(config, save=str(folder), load=load, save_interval=2)
        assert run_ranks(_run, ranks, resumed) == [(8, None)] * ranks
    assert step_bytes(parts, 8) and step_bytes(parts, 8) == step_bytes(whole, 8)


def test_a_blend_names_the_file_and_an_evaluation_stops_too(tmp_path):
    config = corpus_config(tmp_path / "second", "alone")
    blend = with_settings(config, data_path=(str(tmp_path / "first"), str(tmp_path / "second")))
    found = r"iteration 1 \(validation loss\), samples \d+ to \d+: .*second\.bin: document"
    shares = with_settings(
        blend, split="50,50,0", data_path=(str(tmp_path / "second"),), train_iters=1, eval_iters=8
    )
    for config, message in (
        (blend, r"iteration \d, samples .*second\.bin: document"),
        (shares, found),
    ):
        for name in ("first", "second"):
            write_corpus(tmp_path / name)
        with pytest.raises(InputError, match=message):
            raise _run(0, 1, config, tmp_path / "second", slice(240, None))[1]
