"""Mistakes in reading weights of other systems, each put in: a named test must fail."""

import pytest
import torch

from megatron_lite.convert import hf
from megatron_lite.convert.megatron import dist
from tests.convert.megatron import test_dist_layouts
from tests.model import test_transformers_parity as parity
from tests.support.mutants import Mutant, each_is_seen, replaces

pytest.importorskip("transformers")


def joined_by(name, join):
    """Returns a fault of how a layout joins its parts.

    A round trip does not see such a fault if the other direction has it too.
    """

    @replaces(name, hf.LAYOUTS)
    def fault(steps):
        return (steps[0]._replace(join=join),)

    fault.__name__ = f"{name} is joined wrongly"
    return fault


@replaces("_row", dist)
def every_layer_is_the_first_row(_row, chunk, _):
    return _row(chunk, 0)


MUTANTS = [
    *(
        Mutant(
            joined_by(layout, join),
            parity.test_logits_loss_and_gradients_equal_those_of_transformers,
            dict(name=family, dtype=torch.float32, tolerance=1e-5),
        )
        for layout, family, join in (
            ("by group", "llama", lambda parts, _: [torch.cat(list(parts))]),
            ("by expert", "mixtral", lambda parts, _: [torch.stack(list(parts)[::-1])]),
        )
    ),
    Mutant(
        every_layer_is_the_first_row,
        test_dist_layouts.test_stacked_and_numbered_layers_are_read,
        dict(stacked=True, settings=test_dist_layouts.LLAMA),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
