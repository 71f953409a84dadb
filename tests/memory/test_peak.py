"""The moments of a backward against what torch's hooks see in one: bytes held at each save and at
each rebuilding, exactly."""

import weakref
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from megatron_lite.config.recompute import MODULES
from megatron_lite.memory.measure.meter import SavedTensor, kept_for_backward
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.memory.predict.stage_course import replays_of
from megatron_lite.recompute import checkpoint, offload
from megatron_lite.recompute import region_runner as regions
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import Layout, plan_of, sample_tokens
from tests.support.mutants import replaces
from tests.support.pairs import sampled, subsets
from tests.support.ranks import run_ranks
from tests.support.storages import addresses

NUM_LAYERS = 3  # not divisible by units of 2


class Fullest(NamedTuple):
    """Bytes held when the forward ends, and the most while backward rebuilds (0 if it rebuilds
    nothing)."""

    forward: int
    replay: int


POLICIES = (
    "*:none",
    *(f"*:{'+'.join(names)}" for names in subsets(MODULES)),
    *("*:full", "*:full/2", "*:full/3", "0:full; *:none"),
    *("0:full;1:core_attn+pointwise;2:mlp", "0:none;1:full;2:layernorm"),
    "*:none@host",
    "*:full/2@host",
    "*:layernorm+activation@host",
    "0:none@host; 1:full; 2:core_attn+mlp@host",
    "0:full@host; 1:full; 2:mlp@host",
    "0:layernorm@host; 1-2:none",
    "*:none@host(core_attn)",
    "*:none@host(attn_norm+qkv_linear+core_attn+attn_proj+mlp_norm)",
    "0:none@host(linear_fc1+activation); 1:full; 2:none@host(linear_fc2)",
)
SPLIT = (
    *("*:full@split", "*:full/2@split", "*:full/3@split", "0:full@split; *:none"),
    *("0:full@split;1:none;2:full@split", "*:full@split+host"),
    "0:none@host; 1:full@split+host; 2:full@split",
)


DENSE = [name for name in VARIANTS if "num_experts" not in VARIANTS[name]]


def policies(*, can_split):
    return {
        policy: plan_of(policy, NUM_LAYERS) for policy in (*POLICIES, *(SPLIT if can_split else ()))
    }


@contextmanager
def rebuilt_tensors(watch, meter, tables):
    """Appends to `watch` what is held whenever a tensor is saved, and whenever a discarded tensor,
    a mask or a split input has been made again, or a tensor has come back from host memory: those
    live without being saved by anyone, as do the tables that the model holds."""
    unsaved = {next(iter(addresses([one]))): weakref.ref(one.untyped_storage()) for one in tables}

    def look():
        held = {address: storage.num_bytes for address, storage in meter.storages().items()}
        alive = ((address, reference()) for address, reference in unsaved.items())
        watch.append(
            sum(
                (
                    held | {address: one.nbytes() for address, one in alive if one is not None}
                ).values()
            )
        )

    def noted(tensor):
        (address,) = addresses([tensor])
        unsaved[address] = weakref.ref(tensor.untyped_storage())
        look()
        return tensor

    @replaces("rebuilt_outputs", checkpoint)
    def rebuilding(rebuild, node):
        return noted(rebuild(node))

    @replaces("again", regions.Redraw)
    def redrawing(redraw, self, state):
        return noted(redraw(self, state))

    @replaces("start_all_gather_first_dim", checkpoint)
    def gathering(gather, tensor, group):
        started = gather(tensor, group)
        noted(started.result)
        return started

    @replaces("call_back", offload._OnHost)
    def calling_back(call_back, self):
        is_new = self._returned is None
        call_back(self)
        if is_new and self._returned is not None:
            noted(self._returned)

    def pack(tensor):
        saved = meter.pack(tensor)
        look()
        return saved

    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autograd.graph.saved_tensors_hooks(pack, SavedTensor.tensor),
    ):
        for watched in (rebuilding, redrawing, gathering, calling_back):
            watched(patch)
        yield


def measured(config, plan, parallel, layout):
    model = layout.model(config, parallel, dtype=torch.float32, plan=plan)
    held = []
    with kept_for_backward(exclude=model.parameters()) as meter:
        loss = model(*sample_tokens()).mean()
        forward = meter.total_bytes()
        with rebuilt_tensors(held, meter, model.constants()):
            loss.backward()
    return Fullest(forward, max(held, default=0))


def predicted(config, plan, layout):
    here = layout.sizes(config)
    replays = (one.num_bytes for one in replays_of(plan, here))
    return Fullest(activation_bytes(plan, here), max(replays, default=0))


def differences(rank, world_size, config, layout):
    """{policy: (measured, predicted)} where they differ."""
    pairs = {}
    with layout.state() as parallel:
        for name, plan in sampled(policies(can_split=layout.can_split).items(), every=5, at_most=2):
            # Gloo's threads can let go of an operand a moment late.
            found = [measured(config, plan, parallel, layout) for _ in range(2 * world_size - 1)]
            pairs[name] = (Fullest(*map(min, *found, found[0])), predicted(config, plan, layout))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.runs(ci=5)
@pytest.mark.parametrize(
    "variant, dropout", [(variant, dropout) for variant in DENSE for dropout in (0.0, 0.1)]
)
def test_every_moment_of_every_policy_is_the_measured_one(variant, dropout):
    """A router's backward runs its formulas again, whose tensors the meter would take for kept."""
    config = variant_config(
        variant, num_layers=NUM_LAYERS, hidden_dropout=dropout, attention_dropout=dropout
    )
    assert differences(0, 1, config, Layout()) == {}


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize(
    "variant, sequence_parallel", [("gpt2", False), ("llama", False), ("qwen", True)]
)
def test_so_it_is_on_a_rank_of_two(variant, sequence_parallel):
    config = variant_config(variant, num_layers=NUM_LAYERS, hidden_dropout=0.1)
    assert run_ranks(differences, 2, config, Layout(2, sequence_parallel)) == [{}, {}]
