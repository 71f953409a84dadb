"""Every choice of a flag has an entry in each table that builds, prices and counts it."""

import pytest

from megatron_lite.config import data_settings, optimizer_settings
from megatron_lite.config import model as model_config
from megatron_lite.context_parallel.sharded_attention import EXCHANGES
from megatron_lite.data.tokenizers import TOKENIZERS
from megatron_lite.description.sizes import ELEMENT_BYTES
from megatron_lite.memory.explain.recompute_report import likely_device
from megatron_lite.model.norm import NORMS
from megatron_lite.optim.lr_schedule import DECAYS

NEW = "Newest"


def test_the_device_of_an_unknown_backend_is_not_guessed():
    with pytest.raises(ValueError, match=NEW):
        likely_device(NEW)


def test_every_choice_has_an_entry_in_every_table():
    assert model_config.NORM_VECTORS.keys() == NORMS.keys()
    assert set(data_settings.TOKENIZER_TYPES) == TOKENIZERS.keys()
    assert set(optimizer_settings.WSD_DECAY_STYLES) <= DECAYS.keys()
    assert set(optimizer_settings.LR_DECAY_STYLES) <= {
        *DECAYS,
        "constant",
        "inverse-square-root",
        "WSD",
    }
    assert {"p2p", "allgather"} == EXCHANGES.keys() and {
        "fp32",
        "bf16",
        "fp16",
    } == ELEMENT_BYTES.keys()
