"""Mistakes in reading checkpoints of Megatron-LM, each put in: a named test must fail."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.convert.megatron import dist, legacy, source
from tests.convert.megatron import test_dist_layouts, test_legacy_layouts
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("parameter_specs", source)
def gate_and_up_are_one_block(parameter_specs, *args, **kwargs):
    found = parameter_specs(*args, **kwargs)
    return {name: replace(spec, tp_blocks=1) for name, spec in found.items()}


@replaces("CHUNKS", legacy)
def chunks_of_a_rank_are_in_another_order(chunks):
    return chunks[::-1]


@replaces("read", dist.DistTensor)
def every_layer_is_the_first_row(read, self):
    return read(self._replace(layer=self.layer and 0))


MUTANTS = [
    Mutant(
        gate_and_up_are_one_block,
        test_legacy_layouts.test_every_layout_gives_the_whole_weights,
        dict(layout="one file", tp=2, tied=True),
    ),
    Mutant(
        chunks_of_a_rank_are_in_another_order,
        test_legacy_layouts.test_every_layout_gives_the_whole_weights,
        dict(layout="interleaved stages", tp=1, tied=True),
    ),
    Mutant(
        every_layer_is_the_first_row,
        test_dist_layouts.test_stacked_and_numbered_layers_are_read,
        dict(stacked=True, settings=test_dist_layouts.LLAMA),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
