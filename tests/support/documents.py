"""Micro-batches that pack several documents into a sequence."""

import itertools

import torch

from megatron_lite.training.batches import DocumentRules, cut
from tests.support.models import BATCH, SEQ_LENGTH, VOCAB_SIZE

EOD = 5
ALL = DocumentRules(eod=EOD, mask_loss=True, reset_positions=True, reset_attention=True)


def packed_text(seed, *, batch=BATCH, most=4):
    """Returns random samples [b, s + 1] of documents that have 1 to `most` tokens each."""
    random = torch.Generator().manual_seed(seed)
    samples = torch.randint(EOD + 1, VOCAB_SIZE, (batch, SEQ_LENGTH + 1), generator=random)
    for sample in samples:
        place = -1
        while place <= SEQ_LENGTH:
            if place >= 0:
                sample[place] = EOD
            place += int(torch.randint(1, most + 1, (), generator=random))
    return samples


def packed_batch(seed=3, parallel=None):
    """Returns `packed_text` as a micro-batch, or with `parallel` this rank's spans of it."""
    rank, size = (0, 1) if parallel is None else (parallel.cp_rank, parallel.cp_size)
    return cut(packed_text(seed), cp_rank=rank, cp_size=size, rules=ALL)


def documents_of(samples):
    """Returns the documents of the samples, each with the token after its end where there is one.

    Each is [1, n + 1]: n inputs and their labels. The last token of a sample is only a label.
    """
    found = []
    for sample in samples.tolist():
        ends = [place for place, token in enumerate(sample[:-1]) if token == EOD]
        starts = [0, *(place + 1 for place in ends), len(sample) - 1]
        found += [
            torch.tensor([sample[start : stop + 1]])
            for start, stop in itertools.pairwise(starts)
            if start < stop
        ]
    return found


def attended_alone(query, key, value, grad, bounds, *, reach, scale):
    """Returns the output of attention, [s, b, a, d], and the gradients of query, key and value.

    It is the softmax formula for each document alone, in the dtype of the tensors.

    key, value: [s, b, g, d].
    bounds: where documents start in the samples one after another, and the end of the last.
    reach: how many tokens before its own a row reads at most, or None for all.
    """
    seq_length, _, heads, _ = query.shape
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    query, key, value = (each.repeat_interleave(heads // each.shape[2], 2) for each in leaves)
    output = torch.zeros_like(query)
    for start, stop in itertools.pairwise(bounds):
        sample, rows = start // seq_length, slice(start % seq_length, (stop - 1) % seq_length + 1)
        scores = torch.einsum("iad,jad->aij", query[rows, sample], key[rows, sample]) * scale
        places = torch.arange(stop - start)
        distance = places.unsqueeze(1) - places
        hidden = (distance < 0) | (distance > (stop if reach is None else reach))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output[rows, sample] = torch.einsum("aij,jad->iad", weights, value[rows, sample])
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
