"""--contiguous-saved-activations: one allocation for the inputs of all units, slots that always
come back, no bit changed."""

from contextlib import contextmanager

import pytest

from megatron_lite.recompute.stores import ALIGNMENT, FLAG, Arena
from tests.support import offload
from tests.support.models import BATCH, SEQ_LENGTH, sample_tokens
from tests.support.offload import NUM_LAYERS, draw_alike, equal, step
from tests.support.planned import loss_of

INPUT = SEQ_LENGTH * BATCH * 32 * 4  # bytes of a unit's input, s b h in float32
SLOT = -(-INPUT // ALIGNMENT) * ALIGNMENT


def build(policy, *, contiguous=True, micro_batches=1):
    model = offload.build(policy + ", contiguous" * contiguous)
    model.decoder.stores.micro_batches = micro_batches
    return model


def in_use(model):
    return model.decoder.stores.device_bytes + model.decoder.stores.host_bytes


@contextmanager
def allocations():
    """Sizes of the arenas that are made inside."""
    made = []
    real = Arena.__init__

    def noting(self, *args, **facts):
        real(self, *args, **facts)
        made.append(self.num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "__init__", noting)
        yield made


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "policy, sizes",
    [
        ("*:full", [5 * SLOT]),
        ("*:full@host", [5 * SLOT]),
        ("0:none; 1-2:full; 3:pointwise; 4:full", [3 * SLOT]),
        ("0-1:full/2@host; *:full", [SLOT, 3 * SLOT]),
    ],
)
def test_there_is_one_allocation_for_each_kind_of_memory_of_the_planned_size(policy, sizes):
    """And in every step gradients have the bits of a run that keeps everything."""
    ours, plain = build(policy, micro_batches=3), build("*:none", contiguous=False)
    with allocations() as made:
        for batches in ((0, 1, 2), (3, 4), (0, 1, 2)):
            assert equal(step(ours, batches=batches), step(plain, batches=batches))
            assert in_use(ours) == 0
    assert made == [3 * size for size in sizes]
    assert len(ours.decoder.stores.storages()) == len(sizes)


def test_more_forwards_in_flight_than_slots_is_an_error_that_names_the_flag():
    model = build("*:full/2", micro_batches=2)
    losses = [loss_of(model, batch) for batch in (3, 4)]
    with pytest.raises(RuntimeError, match=f"{FLAG}: all 6 slots are in use"):
        model(*sample_tokens(5))
    assert in_use(model) == 6 * INPUT  # those of the two others alone
    losses[0].backward()
    assert in_use(model) == 3 * INPUT
    losses.append(loss_of(model, 5))
    for loss in losses[1:]:
        loss.backward()
    assert in_use(model) == 0


def test_an_arena_that_is_too_small_is_replaced_once_it_is_idle_and_never_shrinks():
    model, plain = build("*:full/2", micro_batches=1), build("*:full/2", contiguous=False)
    with allocations() as made:
        step(model)
        model.decoder.stores.reserve(2)
        assert equal(step(model, batches=(3, 4)), step(plain, batches=(3, 4)))
        model.decoder.stores.reserve(1)
        step(model, batches=(3, 4))
        waiting = loss_of(model)
        model.decoder.stores.reserve(3)
        step(model)  # slots are in use: the arena stays
        assert in_use(model) == 3 * INPUT
        waiting.backward()
        step(model, batches=(3, 4, 5))
    assert made == [3 * SLOT, 6 * SLOT, 9 * SLOT] and len(model.decoder.stores.storages()) == 1


def test_a_larger_input_than_the_first_is_an_error_and_a_smaller_one_fits():
    model, plain = build("*:full"), build("*:full", contiguous=False)
    step(model)

    def shorter(model, length):
        draw_alike(model)
        model.zero_grad()
        loss = model(*sample_tokens(seq_length=length)).mean()
        assert in_use(model) in (0, NUM_LAYERS * INPUT // SEQ_LENGTH * length)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert equal(shorter(model, SEQ_LENGTH - 5), shorter(plain, SEQ_LENGTH - 5))
    with pytest.raises(
        RuntimeError, match=f"{FLAG}: the input of a unit has {INPUT // SEQ_LENGTH * 16} bytes"
    ):
        model(*sample_tokens(seq_length=16))
    assert in_use(model) == 0
