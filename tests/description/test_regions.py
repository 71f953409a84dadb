"""The table of regions against the description of a layer. tests/memory compares both with runs."""

import pytest

from megatron_lite.config.regions import MODULES, REGIONS
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from tests.support.equality import VARIANTS, variant_config

SIZES = Sizes(micro_batch_size=2, seq_length=6, padded_vocab_size=72)


@pytest.mark.parametrize("region", MODULES)
def test_what_a_region_discards_and_leaves_out_is_what_the_table_says(region):
    layers = [describe_layer(variant_config(name, hidden_dropout=0.1), SIZES) for name in VARIANTS]
    operations = [one for layer in layers for one in layer.operations]
    entries = [entry for one in operations for entry in one.enters if entry.region == region]
    assert {bool(entry.discards) for entry in entries} == {REGIONS[region].method == "discard"}
    assert REGIONS[region].skips_tail == any(layer.tail(region) for layer in layers)
    for entry in entries:  # only operations outside save what is discarded
        keepers = [one for one in operations if set(entry.discards) & {t.name for t in one.keeps}]
        assert bool(keepers) == bool(entry.discards)
        assert all(region not in one.regions for one in keepers)
