"""Mistakes with the documents of a sequence, each put back: a named test must fail."""

import torch

from megatron_lite.training import batches
from megatron_lite.training.batches import MaskedMean
from tests.support.models import Layout
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.training import test_documents


@replaces("bounds_of", batches)
def a_document_sees_its_neighbour(bounds_of, samples, eod):
    first, _, *others = bounds_of(samples, eod)
    return [first, *others]


@replaces("masked_mean", batches, test_documents)
def a_rank_counts_its_own_tokens_only(mean, counts, parallel, *, per_token):
    total = torch.tensor(float(sum(counts)), dtype=torch.float64)
    return MaskedMean(mean(counts, parallel, per_token=per_token).factors, total)


PACKED = test_documents.test_packed_documents_have_the_loss_and_gradients_of_documents_one_by_one
MUTANTS = [
    Mutant(a_document_sees_its_neighbour, PACKED, dict(layout=Layout())),
    Mutant(
        a_rank_counts_its_own_tokens_only,
        test_documents.test_the_means_of_data_parallel_ranks_count_all_of_their_tokens,
    ),
]


test_is_seen = each_is_seen(MUTANTS)
