"""The table of regions against the description of a layer, and against what the flags say of it."""

from functools import cache
from itertools import product

import pytest

from megatron_lite.config.regions import MODULES, REGIONS, SHARED_EXPERTS, nested, without_nested
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from tests.support.equality import VARIANTS, variant_config

SIZES = Sizes(
    micro_batch_size=2, seq_length=6, padded_vocab_size=72, tp_size=2, sequence_parallel=True
)


@cache
def layers():
    return [
        describe_layer(
            variant_config(variant, attention_backend=backend, hidden_dropout=0.1), SIZES
        )
        for variant, backend in product(VARIANTS, ("flash", "unfused"))
    ]


def entries(layer, region):
    return [
        entry
        for operation in layer.operations
        for entry in operation.enters
        if entry.region == region
    ]


@pytest.mark.parametrize("region", MODULES)
def test_a_region_lies_inside_its_parent_and_inside_no_other(region):
    for operation in (
        one for layer in layers() for one in layer.operations if region in one.regions
    ):
        outer = operation.outside(region)
        parent = REGIONS[region].parent
        # Both parts of a layer with experts have an activation; one lies in a region of its own.
        assert outer in ((), (parent,), (parent, SHARED_EXPERTS)) and bool(outer) == bool(parent)


@pytest.mark.parametrize("region", MODULES)
def test_discarded_outputs_are_those_that_a_later_operation_saves(region):
    for layer in layers():
        for entry in entries(layer, region):
            assert bool(entry.discards) == (REGIONS[region].method == "discard")
            keepers = [
                one
                for one in layer.operations
                if {tensor.name for tensor in one.keeps} & set(entry.discards)
            ]
            assert bool(keepers) == bool(entry.discards) and all(
                region not in one.regions for one in keepers
            )


@pytest.mark.parametrize("region", MODULES)
def test_a_region_has_a_tail_exactly_where_the_table_says_so(region):
    assert REGIONS[region].skips_tail == any(layer.tail(region) for layer in layers())


def test_a_region_inside_another_one_that_is_named_is_left_out():
    assert without_nested(("activation", "mlp", "dropout")) == {"mlp", "dropout"}
    assert nested(("activation", "mlp")) == [("activation", "mlp")]
    assert (
        without_nested(("activation",)) == {"activation"}
        and nested(("activation", "core_attn")) == []
    )
