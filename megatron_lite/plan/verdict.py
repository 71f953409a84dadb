"""The verdict on a run: does it fit, with which plan, and what would change it.

plan/verdict_text.py has it as plain data and as text. Standard library only.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.states import parameter_count

from .auto_policy import Budget, Plan
from .layouts import KINDS, LOSS_CHUNKS, kind_of, layouts, refusal, resorts
from .problem import LOSS_CHUNK, MICRO_BATCH, Problem
from .search import Search, SearchResult

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"
EXIT_STATUS = {FITS: 0, TIGHT: 1, DOES_NOT_FIT: 2}
MOST_RANKS = 16384
MOST_TRIED = 8  # numbers of ranks, in the search for the fewest that are enough
LEAST_STATES = 4  # bytes of a parameter: weight and gradient in bfloat16, all else on the host
LARGEST_MICRO_BATCH = 4096


class Neighbour(NamedTuple):
    """A plan one step away. fits: whether it does; if not, it has the smallest peak found."""

    change: str
    plan: Plan
    fits: bool


class FitVerdict(NamedTuple):
    """The answer for one number of ranks.

    word: FITS; TIGHT, if the best plan takes a part of the reserve; or DOES_NOT_FIT.
    found: the plans. largest_micro_batch, neighbours: what is one step away from the first.
    """

    word: str
    num_ranks: int
    budget: Budget
    found: SearchResult
    largest_micro_batch: Plan | None = None
    neighbours: tuple[Neighbour, ...] = ()

    @property
    def plan(self) -> Plan:
        """The fastest plan that fits, or the plan with the smallest peak."""
        return self.found.plan


def verdict(
    problem: Problem, num_ranks: int, budget: Budget, *, may_offload: bool = True
) -> FitVerdict:
    """Returns the verdict for so many ranks.

    may_offload: whether host memory may be used if nothing else fits.
    Raises InputError if training would refuse every layout.
    """
    problem = problem._replace(num_ranks=num_ranks)
    search = Search(problem)
    if next(layouts(problem), None) is None:
        raise InputError(f"{num_ranks} GPUs: {refusal(problem)}")
    for word, num_bytes in ((FITS, budget.plan_bytes), (TIGHT, budget.memory_bytes)):
        found = search.find(num_bytes)
        if found.plans:
            best = found.plans[0]
            largest = largest_micro_batch(search, best, num_bytes)
            # One step away, each with its own best policy. Training would refuse some.
            near = [
                _neighbour(*change, best.config, num_bytes)
                for change in _changes(search, best.config)
            ]
            return FitVerdict(word, num_ranks, budget, found, largest, tuple(filter(None, near)))
        # The next round has a chance only if the smallest peak is within its budget.
        if not found.plan.peak.fits(budget.memory_bytes):
            break
    tried = [FitVerdict(DOES_NOT_FIT, num_ranks, budget, found)]
    for group in resorts(problem) if may_offload else ():
        for other in group:
            if next(layouts(other), None) is not None:
                tried.append(verdict(other, num_ranks, budget, may_offload=False))
                # With fewer states in host memory it would not fit either.
                if tried[-1].word == DOES_NOT_FIT and other.base.optimizer.optimizer_cpu_offload:
                    break
        if any(one.word == FITS for one in tried):
            break

    def order(one: FitVerdict) -> tuple[float, float]:
        size = one.plan.peak.num_bytes
        return EXIT_STATUS[one.word], one.plan.time.seconds if one.found.plans else size

    return min(tried, key=order)


def fewest_ranks(problem: Problem, budget: Budget, *, above: int = 0) -> FitVerdict | None:
    """Returns the verdict for the fewest of 1, 2, 4, ... ranks, and more than `above`, on which a
    plan fits.

    Returns None if none of the MOST_TRIED smallest possible numbers is enough: then more ranks do
    not help, because the memory goes to tensors that are not shared out over ranks.
    """
    base = problem.base
    parameters = parameter_count(base.model, base.tokenizer.true_vocab_size)
    count, tried = 1 << above.bit_length(), 0
    while count <= MOST_RANKS and tried < MOST_TRIED:
        # No layout takes less than all states shared out over all ranks.
        states = LEAST_STATES * parameters / count
        sized = problem._replace(num_ranks=count)
        if states <= budget.memory_bytes and next(layouts(sized), None) is not None:
            tried += 1
            if (one := verdict(problem, count, budget)).found.plans:
                return one
        count *= 2
    return None


def smallest_machine(problem: Problem, budget: Budget) -> FitVerdict:
    """Returns the verdict for the fewest ranks on which the run fits: 1, 2, 4, ... of them.

    Raises InputError if more ranks do not help.
    """
    if found := fewest_ranks(problem, budget):
        return found
    raise InputError(
        f"no number of GPUs up to {MOST_RANKS} was found to be enough for this run: its "
        "layouts are refused, or it needs more memory; give --gpus N for the reason"
    )


def largest_micro_batch(search: Search, plan: Plan, budget_bytes: int) -> Plan:
    """Returns the plan with the largest micro-batch that fits in the same layout.

    Sizes are tried in steps of a factor of two, as far as they divide the batch.
    """
    largest = plan
    while (size := 2 * largest.config.training.micro_batch_size) <= LARGEST_MICRO_BATCH:
        found = _neighbour("", search, {MICRO_BATCH: size}, plan.config, budget_bytes)
        if found is None or not found.fits:
            break
        largest = found.plan
    return largest


def _neighbour(
    words: str, search: Search, fields: Mapping[str, Any], base: RunConfig, budget_bytes: int
) -> Neighbour | None:
    """Returns a changed run with its best policy, or None if training would refuse it."""
    try:
        found = search.fit(base.with_fields(fields), budget_bytes)
        return Neighbour(words, found, found.peak.fits(budget_bytes))
    except ValueError:
        return None


def _changes(search: Search, base: RunConfig) -> Iterator[tuple[str, Search, Mapping[str, Any]]]:
    """Yields the words of each change, the search with its ranks, and the new values by field."""
    problem, ranks = search.problem, search.problem.num_ranks
    size, chunk = base.training.micro_batch_size, base.loss_chunk_size
    yield "double the micro-batch", search, {MICRO_BATCH: 2 * size}
    if size % 2 == 0:
        yield "halve the micro-batch", search, {MICRO_BATCH: size // 2}
    if base.training.loss_chunk_size is not None:
        yield "no --loss-chunk-size", search, {LOSS_CHUNK: None}
    smaller = LOSS_CHUNKS[0] if chunk is None else chunk // 2
    if smaller:
        yield f"--loss-chunk-size {smaller}", search, {LOSS_CHUNK: smaller}
    if search.plan(base).dp_cp_size > 1:
        for kind, flags in KINDS.items():
            if kind != kind_of(base):
                yield kind, search, flags
    for count in (ranks + min(ranks, problem.hardware.ranks_per_node), 2 * ranks):
        with suppress(ValueError):  # the batch does not divide over so many
            base.training.num_microbatches(base.parallel.data_parallel_size(count))
            yield f"{count} GPUs", Search(problem._replace(num_ranks=count)), {}
            break
