"""Mistakes with the documents of a sequence, each put back: a named test must fail."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.memory.predict import kept_tensors
from megatron_lite.model import core_attention, documents, window
from megatron_lite.training import batches, loss_mask
from megatron_lite.training.loss_mask import MaskedMean
from megatron_lite.training.step import StageRunner
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.training import test_documents


@replaces("document_starts", batches)
def the_end_of_a_document_belongs_to_the_next_one(starts, tokens, eod):
    ends = tokens == eod
    places = torch.arange(tokens.shape[1])
    return torch.where(ends, places, 0).cummax(1).values


@replaces("document_mask", window, core_attention)
def every_sample_has_the_documents_of_the_first(mask, query, starts, reach=None):
    return mask(query, starts[:1].expand_as(starts), reach)


@replaces("document_mask", window, core_attention)
def a_window_hides_the_documents(mask, query, starts, reach=None):
    return mask(query, starts if reach is None else torch.zeros_like(starts), reach)


@replaces("_document_mask", core_attention.CoreAttention)
def gathered_keys_are_taken_in_the_order_of_the_sequence(_, self, query, starts):
    s = query.shape[0]
    whole = documents.document_mask(query.new_empty(starts.shape[1]), starts)
    return whole[:, :, s * self.cp.rank : s * (self.cp.rank + 1)]


@replaces("__init__", StageRunner)
def stages_in_the_middle_know_no_documents(init, self, *args, **kwargs):
    init(self, *args, **{**kwargs, "everywhere": False})


@replaces("masked_mean", loss_mask, test_documents)
def micro_batches_weigh_as_many_tokens_as_they_have(mean, counts, parallel, *, per_token):
    return mean(counts, parallel, per_token=True)


@replaces("masked_mean", loss_mask, test_documents)
def a_rank_counts_its_own_tokens_only(mean, counts, parallel, *, per_token):
    total = torch.tensor(float(sum(counts)), dtype=torch.float64)
    factors = mean(counts, parallel, per_token=per_token).factors
    return MaskedMean(factors, total)


@replaces("document_starts", kept_tensors)
def the_prediction_forgets_what_a_unit_keeps(starts, sizes):
    return with_fields(starts(sizes), num_bytes=0)


PACKED = test_documents.test_packed_documents_have_the_loss_and_gradients_of_documents_one_by_one
ONE_RANK = dict(tp_size=1, cp_size=1, sequence_parallel=False)
MUTANTS = [
    Mutant(the_end_of_a_document_belongs_to_the_next_one, PACKED, ONE_RANK),
    Mutant(every_sample_has_the_documents_of_the_first, PACKED, ONE_RANK, long=True),
    Mutant(a_window_hides_the_documents, PACKED, ONE_RANK, long=True),
    Mutant(
        gathered_keys_are_taken_in_the_order_of_the_sequence,
        PACKED,
        dict(tp_size=1, cp_size=2, sequence_parallel=False),
        long=True,
    ),
    Mutant(
        stages_in_the_middle_know_no_documents,
        test_documents.test_every_stage_of_a_pipeline_keeps_documents_apart,
        long=True,
    ),
    Mutant(
        micro_batches_weigh_as_many_tokens_as_they_have,
        test_documents.test_a_step_has_the_gradients_of_megatrons_formula,
    ),
    Mutant(
        a_rank_counts_its_own_tokens_only,
        test_documents.test_the_means_of_data_parallel_ranks_count_all_of_their_tokens,
    ),
    Mutant(
        the_prediction_forgets_what_a_unit_keeps,
        test_documents.test_a_policy_changes_no_bit_and_every_byte_is_predicted,
        dict(
            variant="--attention-backend unfused",
            policy="*:full/1",
            without_policy=lambda flags: [],  # the run under the policy ends first
        ),
        error="were predicted",
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
