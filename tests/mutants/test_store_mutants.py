"""Mistakes in offloading and in the arena, each put back: a named test must fail."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.recompute import arena, offload, pool, saved, stores
from megatron_lite.recompute.arena import Arena
from megatron_lite.recompute.offload import Offload, _OnHost, _SegmentCopies
from megatron_lite.recompute.pool import Pool, PooledMemory, Slot
from megatron_lite.recompute.stores import Stores
from tests.recompute import test_arena, test_host_parts, test_offload, test_pool, test_saved
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("finish", Offload)
def originals_are_freed_before_they_are_copied(_, self):
    self._leaving.clear()


@replaces("finish", Offload)
def originals_are_held_by_the_hooks(finish: Any, self: Offload) -> None:
    """Which the graph holds."""
    leaving, list_of_the_hooks = list(self._leaving), self._leaving
    finish(self)
    list_of_the_hooks.extend(leaving)


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


@replaces("call_back", _SegmentCopies)
def copies_come_back_when_they_are_read(_, self):
    pass


@replaces("call_back", _SegmentCopies)
def all_copies_come_back_at_once(call_back: Any, self: _SegmentCopies) -> None:
    call_back(self)
    if self.before is not None:
        self.before.call_back()


@replaces("weakref", offload)
def a_segment_holds_its_copies(_):
    """And they hold it: a cycle."""
    return SimpleNamespace(ref=lambda value: lambda: value)


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


@replaces("take_back", Pool)
def the_pool_gives_new_buffers(_, self, piece):
    pass


@replaces("_make_room", Pool)
def the_pool_keeps_buffers_that_nobody_asks_for(_, self, num_bytes):
    pass


@replaces("PooledMemory", pool)
def a_buffer_forgets_its_last_use(_, memory, last_use=None):
    return PooledMemory(memory)


@replaces("_arena", Stores)
def every_forward_makes_an_arena(real: Any, self: Stores, *args) -> Arena:
    self._arenas.clear()
    return real(self, *args)


@replaces("torch", stores)
def an_arena_is_made_without_gradients_too(torch):
    return SimpleNamespace(**{**vars(torch), "is_grad_enabled": lambda: True})


@replaces("take", Arena)
def a_slot_is_free_as_soon_as_it_is_taken(take: Any, self: Arena, num_bytes: int) -> Slot:
    slot = take(self, num_bytes)
    self._idle.insert(0, PooledMemory(slot._whole))
    return slot


@replaces("take_back", Arena)
def a_slot_is_never_given_back(_, self, piece):
    pass


@replaces("take", Arena)
def a_full_arena_grows(take: Any, self: Arena, num_bytes: int) -> Slot:
    try:
        return take(self, num_bytes)
    except RuntimeError:
        return Slot(self, PooledMemory(torch.empty(num_bytes, dtype=torch.uint8)), num_bytes)


def the_arena_has_slots_for_one_micro_batch(patch: Patch) -> None:
    patch.setattr(
        Stores, "micro_batches", property(lambda self: 1, lambda self, number: None), raising=False
    )


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
FREED = (
    test_offload.test_originals_are_freed_one_segment_later_and_all_of_them_when_the_forward_ends
)
ORDER = test_offload.test_the_unit_before_comes_back_while_a_unit_is_replayed_and_no_other
GROWS = test_pool.test_the_pool_grows_in_the_first_step_only_and_every_buffer_returns
ARENA = test_arena.test_gradients_are_the_same_bits_in_every_step
UNITS, LAYERS = dict(policy="*:full@host"), dict(policy="*:none@host")

MUTANTS = [
    Mutant(originals_are_freed_before_they_are_copied, LATE, LAYERS),
    Mutant(originals_are_freed_before_they_are_copied, LATE, UNITS),
    Mutant(originals_are_held_by_the_hooks, FREED),
    Mutant(
        the_outer_module_decides_what_is_moved,
        test_host_parts.test_a_part_moves_what_its_module_saves_first_and_nothing_else,
        dict(variant="gpt2", parts=("core_attn",)),
    ),
    Mutant(a_buffer_is_given_to_two, LATE, UNITS),
    Mutant(
        a_buffer_is_given_to_two,
        test_pool.test_the_pool_never_holds_more_than_was_in_use_at_one_time,
    ),
    Mutant(backward_does_not_wait_for_the_copy_back, LATE, UNITS),
    Mutant(backward_does_not_wait_for_the_copy_back, LATE, LAYERS),
    Mutant(a_copy_comes_back_from_the_buffer_of_another, LATE, UNITS),
    Mutant(copies_come_back_when_they_are_read, ORDER),
    Mutant(all_copies_come_back_at_once, ORDER),
    Mutant(
        a_segment_holds_its_copies,
        test_pool.test_a_graph_that_is_dropped_without_a_backward_gives_its_buffers_back_at_once,
    ),
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
        the_hooks_in_force_are_replaced,
        test_offload.test_hooks_outside_get_what_stays_and_nothing_that_was_moved,
    ),
    Mutant(
        the_hooks_in_force_are_replaced, test_offload.test_a_lent_tensor_is_neither_moved_nor_kept
    ),
    Mutant(
        what_stays_is_held_as_it_is,
        test_saved.test_an_output_that_stays_is_freed_with_its_graph_at_once,
    ),
    Mutant(
        writes_on_the_way_go_unnoticed,
        test_offload.test_a_tensor_that_is_written_to_on_its_way_is_an_error,
    ),
    Mutant(the_pool_gives_new_buffers, GROWS, dict(**UNITS, batches=(3,))),
    Mutant(
        the_pool_keeps_buffers_that_nobody_asks_for,
        test_pool.test_the_pool_never_holds_more_than_was_in_use_at_one_time,
    ),
    Mutant(
        a_buffer_forgets_its_last_use,
        test_pool.test_a_buffer_remembers_its_last_use_for_the_next_who_takes_it,
    ),
    Mutant(
        every_forward_makes_an_arena,
        test_arena.test_there_is_one_allocation_for_each_kind_of_memory_of_the_planned_size,
        dict(policy="*:full", sizes=[5 * test_arena.SLOT], micro_batches=1),
    ),
    Mutant(
        an_arena_is_made_without_gradients_too, test_arena.test_without_gradients_there_is_no_arena
    ),
    Mutant(a_slot_is_free_as_soon_as_it_is_taken, ARENA, dict(policy="*:full")),
    Mutant(a_slot_is_never_given_back, ARENA, dict(policy="*:full"), error="slots are in use"),
    Mutant(
        a_full_arena_grows,
        test_arena.test_more_forwards_in_flight_than_slots_is_an_error_that_names_the_flag,
    ),
    Mutant(
        the_arena_has_slots_for_one_micro_batch,
        ARENA,
        dict(policy="*:full"),
        error="slots are in use",
    ),
    Mutant(
        the_input_is_not_copied_into_its_slot,
        test_arena.test_a_forward_leaves_no_storage_behind_for_a_unit,
        dict(world_size=1, policy="*:full", size=test_arena.INPUT),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
