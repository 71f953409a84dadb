"""Known tensor-parallel mistakes, each put back: a named comparison with one rank must see it."""

from __future__ import annotations

import dataclasses

import torch

from megatron_lite.model import norm
from megatron_lite.optim import optimizer as norms
from megatron_lite.parallel.collectives import Started
from megatron_lite.parallel.rng import TENSOR_PARALLEL
from megatron_lite.tensor_parallel import layers
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.model import test_dropout
from tests.optim import test_layouts
from tests.parallel import test_equality
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.tensor_parallel import test_layers


@replaces("start_all_reduce_", layers)
def f_without_all_reduce(_, tensor, group):
    return Started(tensor, None)


@replaces("start_reduce_scatter_first_dim", layers)
def sequence_gather_with_a_slice_backward(_, tensor, group):
    return Started(tensor.chunk(group.size())[group.rank()], None)


@replaces("__init__", norm.Norm)
def norm_gradients_not_summed(init, self, *args, **kwargs):
    init(self, *args, **kwargs)
    for parameter in self.parameters(recurse=False):
        parameter.parameter_spec = dataclasses.replace(
            parameter.parameter_spec, sum_grad_over_tp=False
        )


@replaces("forward", layers.VocabParallelEmbedding)
def embedding_without_mask(_, self, tokens):
    """Ids of other ranks' rows look up row 0 of this rank."""
    rows = self.weight.shape[0]
    local = tokens.t() - self.context.rank * rows
    local = local.masked_fill((local < 0) | (local >= rows), 0)
    partial = torch.nn.functional.embedding(local, self.weight)
    return layers.reduce_from_tensor_parallel_region(partial, self.context.group)


@replaces("__init__", norms.Optimizer)
def norm_counts_duplicates_on_every_rank(init, self, *args, **kwargs):
    init(self, *args, **kwargs)
    self._counts_here = [True] * len(self._counts_here)


@replaces("residual_stream", RankContext)
def residual_masks_differ_over_ranks(_, self):
    return TENSOR_PARALLEL


COLUMN = test_layers.test_column_parallel_linear_equals_the_dense_one
MUTANTS = [
    Mutant(f_without_all_reduce, COLUMN, dict(tp_size=2, sequence_parallel=False, tp_blocks=1)),
    Mutant(
        sequence_gather_with_a_slice_backward,
        COLUMN,
        dict(tp_size=2, sequence_parallel=True, tp_blocks=1),
    ),
    Mutant(
        norm_gradients_not_summed,
        test_equality.test_loss_and_every_gradient_equal_those_of_one_rank,
        dict(layout=test_equality.Layout(tp=2, sequence_parallel=True)),
    ),
    Mutant(
        embedding_without_mask,
        test_layers.test_the_embedding_equals_the_dense_one,
        dict(tp_size=2, sequence_parallel=False),
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
