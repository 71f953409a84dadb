"""SmolLM2-135M with its real weights: the same logits and tokens as transformers."""

import pytest
import torch

from megatron_lite.checkpointing.start import find_step
from megatron_lite.parallel.state import parallel_state
from megatron_lite.tools import generation
from tests.support.conversions import converted
from tests.support.ranks import run_ranks
from tests.support.smollm2 import save_smollm2

pytestmark = pytest.mark.long
Tokenizer = pytest.importorskip("tokenizers").Tokenizer
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "theirs").mkdir()
    model = save_smollm2(folder / "theirs")
    assert converted(folder, "hf theirs -> megatron-lite ours") == 0
    return model, folder


def logits(folder, tokens, ranks):
    """Returns our logits [s, V] of a text, on one rank of `ranks`."""
    saved, _ = find_step(str(folder))
    config = generation.config_for_ranks(saved.config, ranks, "gloo")
    with parallel_state(config.parallel, seed=1) as parallel, torch.no_grad():
        return generation.load_model(saved, config, parallel)(torch.tensor([tokens]))[0].clone()


def test_logits_are_those_of_transformers(smollm2):
    """float32 against float32: 1e-4 of the largest logit."""
    theirs, folder = smollm2
    tokens = list(Tokenizer.from_file(str(folder / "theirs" / "tokenizer.json")).encode(PROMPT).ids)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    found = run_ranks(lambda rank, size: logits(folder / "ours", tokens, size), 3)
    for one in found:
        assert (one - expected).abs().max() < 1e-4 * expected.abs().max()
