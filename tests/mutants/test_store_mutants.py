"""Mistakes in offloading and in the arena, each put back: a named test must fail."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_lite.recompute import arena, pool, saved, stores
from megatron_lite.recompute.arena import Arena
from megatron_lite.recompute.offload import Offload, _OnHost
from megatron_lite.recompute.pool import Pool, PooledMemory, Slot
from tests.recompute import test_arena, test_host_parts, test_offload, test_pool, test_saved
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("finish", Offload)
def originals_are_freed_before_they_are_copied(_, self):
    self._leaving.clear()


@replaces("take", Pool)
def a_buffer_is_given_to_two(take: Any, self: Pool, num_bytes: int) -> Slot:
    slot = take(self, num_bytes)
    self.take_back(PooledMemory(slot._whole, slot.last_use))
    return slot


@replaces("call_back", _OnHost)
def backward_does_not_wait_for_the_copy_back(call_back: Any, self: _OnHost) -> None:
    call_back(self)
    self._is_awaited = True


def a_copy_comes_back_from_the_buffer_of_another(patch: Patch) -> None:
    slots: list[Slot] = []

    @replaces("__init__", _OnHost)
    def crossed(init: Any, self: _OnHost, copy_streams, slot, group, device) -> None:
        alike = [other for other in slots if other.memory.numel() == slot.memory.numel()]
        slots.append(slot)
        init(self, copy_streams, alike[0] if alike else slot, group, device)

    crossed(patch)


@replaces("_tensors", stores)
def parameters_and_tables_are_moved(_, shared):
    return iter(())


@replaces("_can_move", saved)
def every_tensor_is_moved(_, tensor, kind):
    return True


@replaces("of", saved._View)
def a_view_forgets_where_it_began(of, tensor, moved):
    return dataclasses.replace(of(tensor, moved), offset=0)


@replaces("hooks_in_force", saved)
def the_hooks_in_force_are_replaced(_):
    return None


@replaces("detach", torch.Tensor)
def what_stays_is_held_as_it_is(_, self):
    return self


def writes_on_the_way_go_unnoticed(patch: Patch) -> None:
    patch.setattr(
        _OnHost, "torn", property(lambda self: False, lambda self, torn: None), raising=False
    )


@replaces("PooledMemory", pool)
def a_buffer_forgets_its_last_use(_, memory, last_use=None):
    return PooledMemory(memory)


@replaces("take", Arena)
def a_slot_is_free_as_soon_as_it_is_taken(take: Any, self: Arena, num_bytes: int) -> Slot:
    slot = take(self, num_bytes)
    self._idle.insert(0, PooledMemory(slot._whole))
    return slot


@replaces("take_back", Arena)
def a_slot_is_never_given_back(_, self, piece):
    pass


@replaces("__init__", arena._InSlot)
def the_input_is_not_copied_into_its_slot(init: Any, self: Any, slot: Slot) -> None:
    """The tensor itself is kept, beside the slot."""
    init(self, slot)
    kept = slot.memory.clone()
    self.memory = lambda: kept


class _Outermost:
    """Names of running modules of which every one is the first."""

    def __init__(self, running: list[str]) -> None:
        self._running = running

    def __bool__(self) -> bool:
        return bool(self._running)

    def __getitem__(self, _: int) -> str:
        return self._running[min(1, len(self._running) - 1)]


@replaces("running_modules", stores)
@contextmanager
def the_outer_module_decides_what_is_moved(real: Any, layer: Any) -> Any:
    """self_attention, not the core attention that runs in it."""
    with real(layer) as running:
        yield _Outermost(running)


LATE = test_offload.test_copies_that_are_made_as_late_as_they_may_be_change_no_gradient
ORDER = test_offload.test_the_unit_before_comes_back_while_a_unit_is_replayed_and_no_other
ARENA = test_arena.test_gradients_are_the_same_bits_in_every_step
UNITS, LAYERS = dict(policy="*:full@host"), dict(policy="*:none@host")

MUTANTS = [
    Mutant(originals_are_freed_before_they_are_copied, LATE, LAYERS),
    Mutant(originals_are_freed_before_they_are_copied, LATE, UNITS),
    Mutant(
        the_outer_module_decides_what_is_moved,
        test_host_parts.test_a_part_moves_what_its_module_saves_first_and_nothing_else,
        dict(variant="gpt2", parts=("core_attn",)),
    ),
    Mutant(a_buffer_is_given_to_two, LATE, UNITS),
    Mutant(backward_does_not_wait_for_the_copy_back, LATE, UNITS),
    Mutant(backward_does_not_wait_for_the_copy_back, LATE, LAYERS),
    Mutant(a_copy_comes_back_from_the_buffer_of_another, LATE, UNITS),
    Mutant(
        parameters_and_tables_are_moved,
        test_offload.test_parameters_tables_and_states_of_generators_stay,
    ),
    Mutant(
        every_tensor_is_moved, test_offload.test_parameters_tables_and_states_of_generators_stay
    ),
    Mutant(every_tensor_is_moved, test_saved.test_tensors_of_other_classes_stay),
    Mutant(
        every_tensor_is_moved,
        test_saved.test_conjugated_and_negated_views_are_what_they_were,
        dict(function=lambda x: (x * 2).conj() * x.exp()),
    ),
    Mutant(
        a_view_forgets_where_it_began,
        test_saved.test_a_view_of_what_was_moved_is_what_it_was,
        dict(name="part"),
    ),
    Mutant(
        what_stays_is_held_as_it_is,
        test_saved.test_an_output_that_stays_is_freed_with_its_graph_at_once,
    ),
    Mutant(
        writes_on_the_way_go_unnoticed,
        test_offload.test_a_tensor_that_is_written_to_on_its_way_is_an_error,
    ),
    Mutant(
        a_buffer_forgets_its_last_use,
        test_pool.test_a_buffer_remembers_its_last_use_for_the_next_who_takes_it,
    ),
    Mutant(a_slot_is_free_as_soon_as_it_is_taken, ARENA, dict(policy="*:full")),
    Mutant(a_slot_is_never_given_back, ARENA, dict(policy="*:full"), error="slots are in use"),
    Mutant(
        the_input_is_not_copied_into_its_slot,
        test_arena.test_a_forward_leaves_no_storage_behind_for_a_unit,
        dict(world_size=1, policy="*:full", size=test_arena.INPUT),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
