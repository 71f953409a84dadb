"""Mistakes in reading checkpoints of Megatron-LM, each put in: a named test must fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lite.convert.megatron import dist, legacy, legacy_states, pickles, source
from megatron_lite.convert.megatron.pickles import Name
from tests.convert.megatron import test_dist_layouts, test_legacy_layouts, test_pickles
from tests.support.mutants import Mutant, assert_seen, replaces


@replaces("parameter_specs", source)
def gate_and_up_are_one_block(parameter_specs, *args, **kwargs):
    found = parameter_specs(*args, **kwargs)
    return {name: replace(spec, tp_blocks=1) for name, spec in found.items()}


@replaces("_chunks", legacy)
def chunks_of_a_rank_are_in_another_order(chunks, where, value):
    return chunks(where, value)[::-1]


@replaces("_is_master", legacy_states)
def the_float32_weights_are_not_compared(_, master, weight):
    return True


@replaces("find_class", pickles._Machine)
def any_name_is_allowed(_, self, module, name):
    return Name(f"{module}.{name}")


@replaces("_key", pickles)
def anything_is_a_key(_, value):
    return value if not isinstance(value, tuple) else str(len(value))


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
        the_float32_weights_are_not_compared,
        test_legacy_layouts.test_states_that_cannot_be_mapped_leave_the_weights,
    ),
    Mutant(
        any_name_is_allowed,
        test_pickles.test_a_malicious_or_damaged_pickle_is_one_error_and_runs_nothing,
        dict(kind="os.system"),
    ),
    Mutant(
        anything_is_a_key,
        test_pickles.test_a_malicious_or_damaged_pickle_is_one_error_and_runs_nothing,
        dict(kind="a deep key"),
    ),
    Mutant(
        every_layer_is_the_first_row,
        test_dist_layouts.test_stacked_and_numbered_layers_are_read,
        dict(stacked=True),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
