"""Known tensor-parallel mistakes, each put back: a named comparison with one rank must see it."""

import dataclasses

import torch

from megatron_lite.model import norm
from megatron_lite.optim import optimizer as norms
from megatron_lite.parallel.rng import TENSOR_PARALLEL
from megatron_lite.tensor_parallel import linear_cross_entropy
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.model import test_dropout
from tests.optim import test_layouts
from tests.parallel import test_equality
from tests.support.models import Layout
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.tensor_parallel import test_cross_entropy


@replaces("__init__", norm.Norm)
def norm_gradients_not_summed(init, self, *args, **kwargs):
    init(self, *args, **kwargs)
    for parameter in self.parameters(recurse=False):
        parameter.parameter_spec = dataclasses.replace(
            parameter.parameter_spec, sum_grad_over_tp=False
        )


@replaces("__init__", norms.Optimizer)
def norm_counts_duplicates_on_every_rank(init, self, *args, **kwargs):
    init(self, *args, **kwargs)
    self._counts_here = [True] * len(self._counts_here)


@replaces("residual_stream", RankContext)
def residual_masks_differ_over_ranks(_, self):
    return TENSOR_PARALLEL


@replaces("add_weight_product_", linear_cross_entropy)
def chunks_add_up_in_bf16(add, total, rows, grad_rows, *, first):
    add(total, rows, grad_rows, first=first)
    total.copy_(total.bfloat16())


MUTANTS = [
    Mutant(
        chunks_add_up_in_bf16,
        test_cross_entropy.test_bf16_chunks_add_less_than_one_rounding_to_the_error_of_the_weights_gradient,
        dict(seq_length=64, vocab_size=512, spread=0.05),
    ),
    Mutant(
        norm_gradients_not_summed,
        test_equality.check,
        dict(layout=Layout(2, sequence_parallel=True), cases=[("gpt2", torch.float64)]),
    ),
    Mutant(
        norm_counts_duplicates_on_every_rank,
        test_layouts.test_every_layout_trains_as_a_single_process,
        dict(mesh="muon-tp2", dtype=torch.float64),
    ),
    Mutant(
        residual_masks_differ_over_ranks,
        test_dropout.test_ranks_share_residual_masks_if_they_hold_the_same_tokens_and_never_attention_masks,
        dict(sequence_parallel=False),
    ),
]


test_is_seen = each_is_seen(MUTANTS)
