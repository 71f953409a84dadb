"""Mistakes in offloading and in the arena, each put back: a named test must fail."""

from megatron_lite.recompute.offload import Offload, _OnHost
from megatron_lite.recompute.pool import Pool
from megatron_lite.recompute.stores import Arena
from tests.recompute import test_arena, test_offload
from tests.support.mutants import Mutant, each_is_seen, replaces


@replaces("finish", Offload)
def originals_are_freed_before_they_are_copied(_, self):
    self._leaving.clear()


@replaces("take", Pool)
def a_buffer_is_given_to_two(take, self, num_bytes):
    slot = take(self, num_bytes)
    self.add(slot._whole, slot.last_use)
    return slot


@replaces("call_back", _OnHost)
def backward_does_not_wait_for_the_copy_back(call_back, self):
    call_back(self)
    self._is_awaited = True


@replaces("take", Arena)
def a_slot_is_free_as_soon_as_it_is_taken(take, self, num_bytes):
    slot = take(self, num_bytes)
    self.add(slot._whole)
    return slot


LATE = test_offload.test_copies_that_are_made_as_late_as_they_may_be_change_no_gradient
ARENA = test_arena.test_gradients_are_the_same_bits_in_every_step
UNITS, LAYERS = dict(policy="*:full@host"), dict(policy="*:none@host")

MUTANTS = [
    Mutant(originals_are_freed_before_they_are_copied, LATE, LAYERS),
    Mutant(a_buffer_is_given_to_two, LATE, UNITS),
    Mutant(backward_does_not_wait_for_the_copy_back, LATE, UNITS),
    Mutant(a_slot_is_free_as_soon_as_it_is_taken, ARENA, dict(policy="*:full")),
]


test_is_seen = each_is_seen(MUTANTS)
