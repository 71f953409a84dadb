"""Micro-batches of token ids on this rank's device, and what the ends of documents mean for them.

    --eod-mask-loss           a token that ends a document does not count in the loss
    --reset-position-ids      learned positions begin at 0 again after such a token
    --reset-attention-mask    a token reads no token of an earlier document

The masks, positions and starts are those of `_get_ltor_masks_and_position_ids` in megatron-core.
Every pipeline stage reads the samples and computes them itself, so no stage sends them to another.

The order in which the samples of a dataset are read (`--dataloader-type`):

single reads them in their order. An example with a global batch of 8 at 24 consumed samples,
micro-batches of 2 and 2 ranks:

    micro-batch    rank 0    rank 1
    0              24 25     26 27
    1              28 29     30 31

An iteration reads [consumed, consumed + global batch) at every data-parallel size. Therefore a run
can go on with the same data on another number of ranks. Every evaluation uses the same rule, and
starts at sample 0.

cyclic is Megatron's random order, number for number. Each pass over the dataset ("epoch") has its
own permutation, torch's of a generator whose seed is the number of the epoch; --seed has no part in
it. The samples at the end that fill no step of all ranks (micro-batch size x data-parallel size)
are left out. The order is a function of the samples consumed before, so that a resumed run reads
what it would have read. Two ways to share a permutation:

    a range for each rank    rank r permutes [r * n, (r + 1) * n) of the samples. Another
                             data-parallel size gives another order.
    --no-data-sharding       rank r takes the places r, r + dp, r + 2 dp, .. of one permutation. A
                             global batch has the same samples at every data-parallel size as long
                             as the sizes leave the same number of samples out of an epoch.

The rest of an epoch may fill a micro-batch on some ranks and not on others. Megatron then reads it
on those ranks, except in a run that is resumed at that place. Here no run reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.context_parallel.attention_kernels import CuSeqlens
from megatron_lite.data.datasets import Dataset
from megatron_lite.model.gpt import NO_DOCUMENTS, Documents
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.sequence_spans import select, spans_of
from megatron_lite.parallel.state import ParallelState


def microbatch_indices(
    consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, microbatch: int
) -> range:
    """Returns the samples of one micro-batch.

    consumed_samples: how many samples were consumed before the iteration.
    microbatch: the number of the micro-batch in the iteration.
    """
    start = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


# Maps a micro-batch to its samples. The arguments are those of `microbatch_indices`.
SampleOrder = Callable[[int, int, int, int, int], Sequence[int]]


def permuted(epoch: int, length: int) -> np.ndarray:
    """Returns the order of the samples in an epoch, of 32 bits each where these suffice."""
    permutation = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).numpy()
    return permutation.astype(np.int32) if length <= np.iinfo(np.int32).max else permutation


def cyclic_order(num_samples: int, *, sharded: bool) -> SampleOrder:
    """Returns the cyclic order of `num_samples` samples.

    sharded: whether each data-parallel rank permutes a range of its own.
    It keeps the permutation of the epoch that was read last, 4 bytes a sample (8 from 2^31 samples
    on).
    """
    of_epoch = lru_cache(maxsize=1)(permuted)

    def indices(
        consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, microbatch: int
    ) -> list[int]:
        """Returns the samples of one micro-batch.

        Raises InputError if the samples consumed before fill no whole steps, or if the dataset is
        shorter than one step.
        """
        step = micro_batch_size * dp_size
        if consumed_samples % step:
            raise InputError(
                f"--dataloader-type cyclic: {consumed_samples} consumed samples are no multiple of "
                f"--micro-batch-size {micro_batch_size} x {dp_size} data-parallel ranks: resume "
                "with the sizes of the run that saved the checkpoint"
            )
        if num_samples < step:
            raise InputError(
                f"--dataloader-type cyclic: the {num_samples} samples of the data are fewer "
                f"than --micro-batch-size {micro_batch_size} x {dp_size} data-parallel ranks"
            )
        in_epoch = num_samples - num_samples % step
        epoch, place = divmod(consumed_samples + microbatch * step, in_epoch)
        if sharded:
            length, start = in_epoch // dp_size, place // dp_size
            taken = of_epoch(epoch, length)[start : start + micro_batch_size]
            return (taken.astype(np.int64) + dp_rank * length).tolist()
        # Megatron permutes all whole micro-batches here, although an epoch reads whole steps.
        whole = of_epoch(epoch, num_samples // micro_batch_size * micro_batch_size)
        return whole[place + dp_rank : place + step : dp_size].tolist()

    return indices


def sample_order(data: DataConfig, num_samples: int) -> SampleOrder:
    """Returns the order in which a dataset of `num_samples` samples is read."""
    if data.dataloader_type == "cyclic":
        return cyclic_order(num_samples, sharded=data.data_sharding)
    return microbatch_indices


class MicroBatch(NamedTuple):
    """tokens and labels: token ids, each [b, s/c]. Labels are the tokens one position later.

    loss_mask: [b, s/c] float32, 1 for a token that counts in the loss and 0 for another. None: all
        count.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None
    documents: Documents = NO_DOCUMENTS


class Batches(Protocol):
    """The micro-batches of a step, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> MicroBatch: ...


def cut(
    samples: Tensor,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    rules: DocumentRules | None = None,
    bounds: Sequence[int] | None = None,
) -> MicroBatch:
    """Returns one context-parallel rank's spans of samples [b, s + 1] as a micro-batch.

    rules: what the ends of documents mean; None: nothing.
    bounds: those of the documents (`bounds_of`), which are found in the samples if they are None.
    """

    def own(whole: Tensor) -> Tensor:
        # Backward saves the tokens. A view would keep the storage of the whole sample alive.
        if cp_size == 1:
            return whole.clone(memory_format=torch.contiguous_format)
        return select(whole, spans_of(whole.shape[1], rank=cp_rank, size=cp_size), 1)

    batch = MicroBatch(own(samples[:, :-1]), own(samples[:, 1:]))
    if rules is None:
        return batch
    if rules.mask_loss:
        batch = batch._replace(loss_mask=(batch.tokens != rules.eod).float())
    if not (rules.reset_positions or rules.reset_attention):
        return batch
    length = samples.shape[1] - 1
    bounds = bounds_of(samples.numpy(), rules.eod) if bounds is None else bounds
    packed = CuSeqlens.of(bounds, batch=samples.shape[0], seq_length=length, device=samples.device)
    position_ids = None
    if rules.reset_positions:
        position_ids = own(torch.arange(length, device=samples.device) - packed.starts(length))
    return batch._replace(
        documents=Documents(position_ids, packed if rules.reset_attention else None)
    )


class DocumentRules(NamedTuple):
    """The id that ends a document, and which of the three flags are in force."""

    eod: int
    mask_loss: bool = False
    reset_positions: bool = False
    reset_attention: bool = False


def document_rules(config: RunConfig) -> DocumentRules | None:
    """Returns the rules of a run, or None if it treats the ends of documents like other tokens.

    Raises InputError if the tokenizer has no end-of-document token.
    """
    data = config.data
    if not (given := data.document_flags):
        return None
    from megatron_lite.data.tokenizers import build_tokenizer

    try:
        eod = build_tokenizer(config.tokenizer).eod
    except InputError as error:
        raise InputError(f"{' and '.join(given)} needs the end of documents: {error}") from error
    return DocumentRules(
        eod=eod,
        mask_loss=data.eod_mask_loss,
        # Rotary tables follow the place in the sequence, as in Megatron.
        reset_positions=data.reset_position_ids and config.model.learns_positions,
        reset_attention=data.reset_attention_mask,
    )


def bounds_of(samples: np.ndarray, eod: int) -> list[int]:
    """Returns where the documents of samples [b, s + 1] begin and end, among their b s tokens."""
    ends = samples[:, :-1] == eod
    ends[:, -1] = True
    return [0, *(np.flatnonzero(ends) + 1).tolist()]


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """This rank's micro-batches of the iteration that starts after `consumed_samples`.

    Each is read when it is indexed. A sample that cannot be read raises InputError, whose message
    starts with `where`. Tensor- and context-parallel ranks read the same samples; all of them but
    the first raise PeerError, so that one rank reports the fault.

    order: the samples of a micro-batch; the default reads them in their order.
    """

    dataset: Dataset
    micro_batch_size: int
    parallel: ParallelState
    consumed_samples: int = 0
    num_microbatches: int = 0
    where: str = "evaluation"
    order: SampleOrder = microbatch_indices
    rules: DocumentRules | None = None

    def __len__(self) -> int:
        return self.num_microbatches

    def __getitem__(self, number: int) -> MicroBatch:
        parallel = self.parallel
        read, bounds = self._read(number), None
        if self.rules is not None:
            bounds = bounds_of(read, self.rules.eod)
        samples = torch.from_numpy(read)
        if parallel.device.type == "cuda":  # an asynchronous copy, from pinned memory
            samples = samples.pin_memory().to(parallel.device, non_blocking=True)
        return cut(
            samples,
            cp_rank=parallel.cp_rank,
            cp_size=parallel.cp_size,
            rules=self.rules,
            bounds=bounds,
        )

    def counts(self) -> list[int]:
        """Returns how many tokens of each micro-batch count in the loss, on all its ranks. [] if
        the loss has no mask.

        Reads all samples once more, on the host.
        """
        if self.rules is None or not self.rules.mask_loss:
            return []
        eod = self.rules.eod
        return [
            int(np.count_nonzero(self._read(number)[:, :-1] != eod))
            for number in range(self.num_microbatches)
        ]

    def attended(self) -> Tensor:
        """Returns which share of the samples' s x s squares lies within documents, on all ranks.

        Reads all samples once more, on the host. Issues an all-reduce of a number over dp_group.
        """
        assert self.rules is not None
        pairs = squares = 0
        for number in range(self.num_microbatches):
            read = self._read(number)
            bounds = bounds_of(read, self.rules.eod)
            pairs += sum((stop - start) ** 2 for start, stop in pairwise(bounds))
            squares += bounds[-1] * (read.shape[1] - 1)
        return (
            all_reduce_(_sent(pairs / squares, self.parallel), self.parallel.dp_group)
            / self.parallel.dp_size
        )

    def _read(self, number: int) -> np.ndarray:
        """Returns the samples of a micro-batch, [b, s + 1].

        An InputError says where they were to be read.
        """
        parallel = self.parallel
        indices: Sequence[int] = ()
        ranks = parallel.dp_rank, parallel.dp_size
        try:
            indices = self.order(self.consumed_samples, self.micro_batch_size, *ranks, number)
            return np.stack([self.dataset[index] for index in indices])
        except InputError as error:
            kind = PeerError if parallel.tp_rank or parallel.cp_rank else InputError
            place = self.where
            if isinstance(indices, range):
                place += f", samples {indices.start} to {indices.stop - 1}"
            elif indices:
                place += f", samples {', '.join(map(str, indices))}"
            raise kind(f"{place}: {error}") from error


class MaskedMean(NamedTuple):
    """The factors that make a mean of the sums of the masked losses.

        gradients are those of                                the log has
        by default: the mean over micro-batches of            sum(mask loss) / sum(mask)
        sum(mask loss) / sum(mask) of each                    over the global batch
        --calculate-per-token-loss: sum(mask loss) /          the same
        sum(mask) over the global batch

    Both are Megatron's. A sum of masks counts as 1 if it is 0. A micro-batch is that of all its
    context-parallel ranks, so context parallelism does not change the result. Megatron-core 0.16
    gives each context-parallel rank's mean the same weight.

    factors: [m] float64, the factor on the gradients of each micro-batch's sum.
        num_tokens: 0-d float64, the tokens of the global batch that count, at least 1.
    """

    factors: Tensor
    num_tokens: Tensor


def masked_mean(counts: Sequence[int], parallel: ParallelState, *, per_token: bool) -> MaskedMean:
    """Returns the mean of a step. Issues one all-reduce of a number over `dp_group`.

    counts: the tokens that count in each of this rank's micro-batches, on all context-parallel
        ranks together.
    """
    own = _sent(counts, parallel)
    total = all_reduce_(own.sum(), parallel.dp_group).clamp(min=1.0)
    if per_token:
        return MaskedMean(total.reciprocal().expand(len(counts)), total)
    # the mean over a micro-batch's tokens, times its share of all micro-batches of all ranks
    shares = own.clamp(min=1.0) * (len(counts) * parallel.dp_size)
    return MaskedMean(shares.reciprocal(), total)


def _sent(figures: Any, parallel: ParallelState) -> Tensor:
    """Returns figures on the device, in float64. No copy waits for the steps before."""
    pins, device = parallel.device.type == "cuda", parallel.device
    return torch.tensor(figures, dtype=torch.float64, pin_memory=pins).to(device, non_blocking=True)
