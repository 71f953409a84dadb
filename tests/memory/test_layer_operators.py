"""The list of a layer's operators against what torch dispatches in its forward; what is held when a
layer has been rebuilt."""

import pytest
import torch

from megatron_lite.config.policy import IN_GROUPS
from megatron_lite.description.transformer_layer import describe_layer
from tests.support.dispatch import Dispatches, tensors_in
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import BATCH, SEQ_LENGTH, build_tiny_model, plan_of, tiny_sizes, tp_state
from tests.support.ranks import run_ranks


def sizes(tp_size, sequence_parallel, dtype=torch.float32):
    return tiny_sizes(tp_size, sequence_parallel=sequence_parallel, element_bytes=dtype.itemsize)


class InGroups(Dispatches):
    """The operators that some group holds, in order, with the bytes of their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def saw(self, func, args, kwargs, results):
        if str(func) in IN_GROUPS:
            found = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(results))
            self.seen.append((str(func), found))


def wrong_lists(rank, world_size, sequence_parallel):
    """By variant, attention and dtype: (dispatched, listed), where they differ. In layers that may
    keep any result."""
    pairs = {}
    with tp_state(world_size) as parallel:
        for variant in VARIANTS:
            for backend, dropout in (("flash", 0.0), ("unfused", 0.1)):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    config = variant_config(
                        variant, num_layers=1, attention_backend=backend, attention_dropout=dropout
                    )
                    plan = plan_of("*:ops(max)", 1, recompute_tail_skip=False)
                    model = build_tiny_model(
                        config,
                        parallel,
                        sequence_parallel=sequence_parallel,
                        dtype=dtype,
                        plan=plan,
                    )
                    hidden = torch.randn(
                        SEQ_LENGTH // (world_size if sequence_parallel else 1),
                        BATCH,
                        32,
                        dtype=dtype,
                    )
                    rotary = (
                        model.rotary_tables(SEQ_LENGTH)
                        if config.position_embedding_type == "rope"
                        else None
                    )
                    with InGroups() as dispatched:
                        model.decoder(hidden.requires_grad_(), rotary)
                    layer = describe_layer(config, sizes(world_size, sequence_parallel, dtype))
                    listed = [
                        (call.operator, sum(tensor.num_bytes for tensor in call.returns))
                        for operation in layer.operations
                        for call in operation.calls
                        if call.operator  # the others run where no mode sees them
                    ]
                    pairs[f"{variant} {backend} {dtype}"] = (dispatched.seen, listed)
    assert all(listed for _, listed in pairs.values())
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_a_layers_operators_and_result_bytes_are_those_torch_dispatches(tp_size, sequence_parallel):
    assert run_ranks(wrong_lists, tp_size, sequence_parallel, detail=False) == [{}] * tp_size
