"""Faults in the shared memory of a host's ranks (parallel/shared_memory.py)."""

from __future__ import annotations

import pytest

from megatron_lite.parallel import shared_transfers
from megatron_lite.parallel.shared_memory import Channel
from tests.parallel import test_shared_memory as tests
from tests.support.mutants import Mutant, assert_seen, replaces


@replaces("_has_slot", Channel)
def a_slot_is_written_before_all_have_read_it(_, self):
    return True


def a_slot_is_read_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    for name in ("_await_chunk", "_check_signature"):
        replaces(name, Channel)(lambda *_: None)(patch)


@replaces("_check_signature", Channel)
def nobody_compares_the_collectives(_, self, other, transfer):
    pass


@replaces("chunk_elements", shared_transfers)
def sums_are_in_one_order_throughout(_, num_elements, element_bytes, size):
    return max(1, num_elements)


MUTANTS = [
    Mutant(
        a_slot_is_written_before_all_have_read_it,
        tests.test_collectives_in_flight_do_not_mix,
        dict(size=2),
        error="AssertionError",
    ),
    Mutant(
        a_slot_is_read_before_it_is_written,
        tests.test_a_rank_that_does_not_come_is_named_after_the_timeout,
        error="DID NOT RAISE",
    ),
    Mutant(
        nobody_compares_the_collectives,
        tests.test_a_rank_in_another_collective_is_an_error,
        error="DID NOT RAISE",
    ),
    Mutant(
        sums_are_in_one_order_throughout,
        tests.test_every_collective_has_the_bits_of_gloo,
        dict(size=3),
        error="AssertionError",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
