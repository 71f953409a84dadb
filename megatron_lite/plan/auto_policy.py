"""The fastest recompute policy of a run whose layout is given, within a budget of memory.

    choose_policy(config, hardware, budget_bytes, num_ranks) -> "0-3:full; 4-7:none"

Each pipeline rank gets the fastest mix of actions (policies.py) that fits beside its other bytes:
weights, gradients, optimizer states and workspaces. memory/predict/step_peak.py has the last word:
the space of a rank is corrected by the difference to it until the whole run fits. Standard library
only.

The prediction counts what a run allocates through torch. The reserve of a `Budget` is for what it
does not see: the context of CUDA and the libraries' workspaces, the buffers of NCCL, and memory
that torch's allocator cannot use because it lies in pieces.
"""

from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import parse_bytes, size
from megatron_lite.description.sizes import layers_of
from megatron_lite.memory.predict.step_peak import KEPT
from megatron_lite.plan.hardware import Hardware
from megatron_lite.plan.policies import least_seconds
from megatron_lite.plan.rank_mixes import Plan, RankMixes

ROUNDS = 6  # corrections of the space; two are usual
# Assumptions, stated in docs/planning.md. 1 GiB for the context, cuBLAS and NCCL; 3 % of the card
# for pieces.
RESERVE_BYTES, RESERVE_SHARE = 2**30, 0.03


class Budget(NamedTuple):
    """The memory of a card and the part of it that stays free."""

    memory_bytes: int
    reserve_bytes: int

    @property
    def plan_bytes(self) -> int:
        """The bytes that a plan may take."""
        return self.memory_bytes - self.reserve_bytes


def default_reserve(memory_bytes: int) -> int:
    """Returns the reserve of a card."""
    return RESERVE_BYTES + round(RESERVE_SHARE * memory_bytes)


def choose_policy(config: RunConfig, hardware: Hardware, budget_bytes: int, num_ranks: int) -> str:
    """Returns the text of the fastest policy with which the fullest rank fits the budget.

    config: the run. Its own recompute flags do not count.
    budget_bytes: the bytes for everything that a rank allocates.
    Raises InputError with the smallest reachable peak if no policy fits. Raises ValueError if the
    ranks or the batch do not divide.
    """
    found = fitted(Plan(config, hardware, num_ranks), budget_bytes)
    if not (peak := found.peak).fits(budget_bytes):
        largest = max(peak.terms, key=lambda term: term.num_bytes)
        raise InputError(
            f"no recompute policy fits in {size(budget_bytes)}: the smallest peak is "
            f"{size(peak.num_bytes)}, on pipeline rank {peak.rank}, of which "
            f"{size(largest.num_bytes)} are {largest.name}; give more memory, a smaller "
            "--micro-batch-size or more ranks"
        )
    return str(found.config.recompute.policy)


def fitted(run: Plan, budget_bytes: int, *, or_smallest: bool = True) -> Plan:
    """Returns the run with the fastest policy that fits the budget.

    If none does, it is that with the smallest peak that was found. or_smallest: False saves the
    time to look for that one: any other policy takes its place.
    """
    whole = run.with_policy(None)
    if whole.peak.fits(budget_bytes):
        return whole
    search = RankMixes(run)
    spaces = search.spaces(search.least(), budget_bytes)
    best, tried = None, []
    low = high = None  # the largest spaces that are known to fit, and the smallest that do not
    for _ in range(ROUNDS):
        mixes = search.mixes(spaces)
        if mixes is None or mixes in tried:
            break
        tried.append(mixes)
        found = search.plan(mixes)
        lacks = found.peak.num_bytes - budget_bytes
        corrected = search.spaces(mixes, budget_bytes)
        if lacks <= 0:
            best, low = found, spaces
        else:
            high = spaces
        if low and high:
            spaces = {rank: (low[rank] + high[rank]) // 2 for rank in spaces}
        else:
            nearer = max if low else min
            spaces = {rank: nearer(space, corrected[rank]) for rank, space in spaces.items()}
            if high and found.peak.rank not in spaces:  # the correction has not seen this rank
                spaces[search.alike[found.peak.rank]] -= lacks
    for found in () if best else search.units():
        if found.peak.fits(budget_bytes):
            best = min(best or found, found, key=lambda one: one.peak.num_bytes)
        elif sum(one.num_bytes for one in found.peak.terms if one.name != KEPT) > budget_bytes:
            break  # longer units keep less, and rebuild more at a time
    if best is None and or_smallest:
        return min(search.units(), key=lambda one: one.peak.num_bytes)
    return best or whole


def least_replays(run: Plan, budget_bytes: int) -> list[float] | None:
    """Returns a lower bound of the seconds of the replays of a micro-batch by pipeline rank, or
    None if no policy fits: only states and activations are counted."""
    search, fsdp = RankMixes(run), run.config.data_parallel.use_torch_fsdp2
    found, alike = [], layers_of(run.config)
    usual = max(alike, key=alike.count)
    for rank in range(search.size):
        states = run.states(search.alike[rank])
        # Under FSDP2 no gradients exist before the first backward.
        space = budget_bytes - states.total + (states.gradients if fsdp else 0)
        # The choices are those of the most frequent kind of layer: others may cost less.
        layers = min(
            alike[one.first_layer :][: one.num_layers].count(usual)
            for one in search.stages[rank :: search.size]
        )
        bound = least_seconds(search.choices, layers, search.in_flight(rank), space)
        if bound is None:
            return None
        found.append(bound.seconds * len(search.stages) / search.size)
    return found


def with_chosen_policy(
    config: RunConfig, hardware: Hardware, num_ranks: int, *, device_bytes: int | None
) -> tuple[RunConfig, str]:
    """Returns the configuration with the fastest policy that fits its --memory-budget, and a line
    for the log.

    hardware: the machine for which times are compared.
    device_bytes: the memory of one rank's device, for a run without a budget. The reserve of a GPU
        stays free beside any budget.
    Raises InputError if no policy fits, with the smallest peak that can be reached, and if the
    budget is missing.
    """
    recompute = config.recompute
    usable = None if device_bytes is None else device_bytes - default_reserve(device_bytes)
    if recompute.memory_budget is not None:
        budget = parse_bytes("--memory-budget", recompute.memory_budget)
        words = f"--memory-budget {recompute.memory_budget}"
        if usable is not None and hardware.device == "cuda" and budget > usable:
            budget = usable
            words += f", of which {size(usable)} are usable: a reserve of the GPU stays free"
    elif usable is None:
        raise InputError(
            "--recompute-policy auto needs to know how much memory a rank may use: give "
            "--memory-budget, such as --memory-budget 4GiB"
        )
    else:
        budget, words = usable, f"{size(usable)}, the GPU's memory less a reserve"
    with input_faults():
        text = choose_policy(config, hardware, budget, num_ranks)
        recompute = replace(recompute, recompute_policy=text, memory_budget=None)
        config = replace(config, recompute=recompute)
    return config, f"--recompute-policy auto chose {text!r}, the fastest policy within {words}"
