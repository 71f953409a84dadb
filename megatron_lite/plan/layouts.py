"""The layouts that a search tries: how the ranks share a model, and how a step is cut.

DIMENSIONS is the table of them. Each row has the fields of a dimension and a function that yields
values for them; it knows the values of the rows above. A dimension that the user gives is fixed.
Every layout is a RunConfig, so a layout that training would refuse is never tried. Standard library
only.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from megatron_lite.config.optimizer_settings import FLOAT32
from megatron_lite.config.optimizer_settings import FORMATS as BYTES
from megatron_lite.config.parallel import CP_COMM_TYPES, no_flash_across_ranks
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import whole_model
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import forward_flops, logits_flops
from megatron_lite.memory.predict.states import parameter_count, stage_parameters

from .auto_policy import Plan
from .problem import (
    AWARE,
    CONTEXT,
    DATA_PARALLEL,
    ENDS,
    EXCHANGE,
    EXPERTS,
    FORMATS,
    INSTANCES,
    LOSS_CHUNK,
    MEAN_SQUARE,
    MICRO_BATCH,
    NUMBERS,
    OFFLOAD,
    PIPELINE,
    RESHARD,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    WRAPPING,
    Problem,
)

MICRO_BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
LEAST_CONTEXT = 256  # tokens of a sequence on one rank, if longer parts do not suffice
LOSS_CHUNKS = (1024, 4096, 256)  # of which those count that are shorter than a micro-batch
MOST_VIRTUAL_STAGES = 8
USUAL_HOST_BYTES = 128 * 2**30  # of a GPU, if --host-memory is not given and nothing else fits
OFFLOAD_FRACTIONS = (1.0, 0.75, 0.5, 0.25)
REPLICATED, ZERO1, FSDP2 = "replicated", "ZeRO-1", "FSDP2"
_OFF = dict.fromkeys(
    ("overlap_grad_reduce", "overlap_param_gather", *DATA_PARALLEL, WRAPPING), False
) | {RESHARD: True}
# The flags of each kind of data parallelism. Overlap costs no memory.
KINDS: Mapping[str, Mapping[str, int]] = {
    REPLICATED: {**_OFF, "overlap_grad_reduce": True, INSTANCES: 1},
    ZERO1: {
        **_OFF,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    FSDP2: {**_OFF, "use_torch_fsdp2": True},
}
Row = Mapping[str, Any]  # values by field


def kind_of(config: RunConfig) -> str:
    """Returns the name of the kind of data parallelism."""
    if config.data_parallel.use_torch_fsdp2:
        return FSDP2
    return ZERO1 if config.data_parallel.use_distributed_optimizer else REPLICATED


def _given(problem: Problem, fields: Iterable[str]) -> dict[str, Any]:
    """Returns those of the fields that the user has fixed, with their values."""
    return {name: problem.fixed[name] for name in fields if name in problem.fixed}


def refusal(problem: Problem) -> str:
    """Returns why no layout of so many ranks has the dimensions that are fixed."""
    try:
        config = problem.base.with_fields({**problem.fixed, **(problem.policy or {})})
        config.batch_schedule(config.parallel.data_parallel_size(problem.num_ranks))
    except ValueError as error:
        return str(error)
    return (
        f"no layout of {problem.num_ranks} ranks divides the heads, the layers, the sequence and "
        f"--global-batch-size {problem.base.training.global_batch_size}: change one of them"
    )


def layouts(problem: Problem) -> Iterator[RunConfig]:
    """Yields the layouts of so many ranks, for each of which `variants`, `virtuals`, `recuts` and
    `savers` yield others.

    No layout has a recompute policy of its own.
    """
    rows: list[Row] = [problem.policy or {}]
    for fields, values in DIMENSIONS:
        fixed = _given(problem, fields)
        rows = [
            {**row, **more} for row in rows for more in ([fixed] if fixed else values(problem, row))
        ]
    for row in rows:
        yield from _possible(problem, problem.base, row)


def _possible(problem: Problem, base: RunConfig, row: Row) -> Iterator[RunConfig]:
    """Yields the run with these values, unless training would refuse it."""
    with suppress(ValueError):
        config = base.with_fields(row)
        parallel = config.parallel
        pp = parallel.pipeline_model_parallel_size
        dp_size = parallel.data_parallel_size(problem.num_ranks)
        # Every batch divides over the ranks, from the start of the run on.
        batches = config.batch_schedule(dp_size)
        is_virtual = len(config.stages()) > pp
        if (is_virtual and config.training.num_microbatches(dp_size) % pp) or any(
            size % batches.samples_per_microbatch for size in batches.sizes
        ):
            return
        plan = Plan(config, problem.hardware, problem.num_ranks)
        if problem.states_on_host is None or problem.states_on_host >= plan.states_on_host:
            yield config


def least_states(problem: Problem, config: RunConfig) -> float:
    """Returns a lower bound of the bytes of states on the fullest rank, however layers are cut into
    stages: the mean of all ranks."""
    parallel, optimizer, model = config.parallel, config.optimizer, config.model
    kind = kind_of(config)
    own = stage_parameters(config, whole_model(model.num_layers))
    element = BYTES[config.training.precision]
    whole = element + BYTES[optimizer.main_grads_dtype]  # of a parameter on each rank
    shared = BYTES[optimizer.main_params_dtype] * (element < FLOAT32)
    shared = (shared + sum(optimizer.state_bytes(of_matrix=True))) * (
        not optimizer.optimizer_cpu_offload
    )
    if kind == FSDP2:
        whole, shared = 0, shared + FLOAT32 * (element == FLOAT32)
    elif kind == REPLICATED:
        whole, shared = whole + shared, 0
    every = parameter_count(model, config.tokenizer.true_vocab_size)
    return own * whole / parallel.pipeline_model_parallel_size + every * shared / problem.num_ranks


def resorts(problem: Problem) -> Iterator[list[Problem]]:
    """Yields groups of other problems for a run that does not fit: with shorter parts of sequences,
    with FSDP2 in pipelines, with host memory, and then with formats of fewer and fewer bits too, as
    far as the user has decided none of these."""
    if CONTEXT not in problem.fixed:
        problem = problem._replace(least_context=LEAST_CONTEXT)
        yield [problem]
    if problem.fixed.keys().isdisjoint((*DATA_PARALLEL, PIPELINE)):
        yield [problem._replace(fixed={**problem.fixed, DATA_PARALLEL[1]: True})]
    yield from _with_host_memory(problem)
    if not problem.base.optimizer.is_rounded and problem.fixed.keys().isdisjoint(FORMATS):
        for chosen in (FORMATS[:1], FORMATS):
            more = dict.fromkeys(chosen, "bf16") | dict.fromkeys((AWARE, DATA_PARALLEL[0]), True)
            if MEAN_SQUARE in more:  # in bfloat16 it never falls (config/notices.py)
                more[MEAN_SQUARE] = "fp16"
            with suppress(ValueError):  # training would refuse it
                narrow = problem._replace(base=problem.base.with_fields(more))
                yield [narrow]
                yield from _with_host_memory(narrow)


def _with_host_memory(problem: Problem) -> Iterator[list[Problem]]:
    """Yields groups with host memory: for policies, or for less and less of the optimizer states,
    and then for both."""
    hosted = []
    for fraction in OFFLOAD_FRACTIONS if OFFLOAD not in problem.fixed else ():
        fields = {
            OFFLOAD: True,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "optimizer_offload_fraction": fraction,
        }
        with suppress(ValueError):  # training would refuse it
            hosted.append(problem._replace(base=problem.base.with_fields(fields)))
    keeping = problem.states_on_host is None and problem.policy is None
    rich = [one._replace(host_bytes=USUAL_HOST_BYTES) for one in (problem, *hosted[:1]) if keeping]
    yield [*rich[:1], *hosted]
    yield rich[1:]


def _divisors(name: str, number: int, most: int) -> Iterator[Row]:
    """Yields the values of a field that divide a number, up to `most`."""
    return ({name: size} for size in range(1, min(number, most) + 1) if number % size == 0)


def _contexts(problem: Problem, row: Row) -> Iterator[Row]:
    uneven = (problem.base.training.global_batch_size or 0) % problem.num_ranks > 0
    most = problem.base.data.seq_length // (LEAST_CONTEXT if uneven else problem.least_context)
    return _divisors(CONTEXT, problem.num_ranks // row[TENSOR], max(1, most))


def _ways(problem: Problem) -> tuple[str, ...]:
    """Returns the ways in which context-parallel ranks can exchange keys and values."""
    model, resets = problem.base.model, problem.base.data.reset_attention_mask
    whole = model.window_size or no_flash_across_ranks(model.attention_dropout, resets)
    return ("a2a",) if whole and not model.always_unfused else CP_COMM_TYPES


def most_virtual(problem: Problem, config: RunConfig) -> int:
    """Returns the most virtual stages that the search gives each rank of a layout."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1 and problem.fixed.keys().isdisjoint(NUMBERS):
        return MOST_VIRTUAL_STAGES
    return parallel.num_virtual_stages_per_pipeline_rank or 1


def virtuals(problem: Problem, config: RunConfig) -> Iterator[RunConfig]:
    """Yields a layout of `variants` with 2, 3, ... virtual stages, as far as the user has fixed no
    number of them, each with the most even cut of the layers."""
    size = config.parallel.pipeline_model_parallel_size
    if problem.fixed.keys().isdisjoint(NUMBERS):
        for virtual in range(2, most_virtual(problem, config) + 1):
            for ends in _ends(problem, size, virtual)[:1]:
                yield from _possible(problem, config, {**dict.fromkeys(VIRTUAL), **ends})


def recuts(problem: Problem, config: RunConfig) -> Iterator[RunConfig]:
    """Yields a layout of `variants` or `virtuals` with every other cut of its layers into as many
    stages that has the numbers that the user has fixed."""
    parallel = config.parallel
    virtual = parallel.num_virtual_stages_per_pipeline_rank or 1
    for ends in _ends(problem, parallel.pipeline_model_parallel_size, virtual)[1:]:
        yield config.with_fields(ends)


def savers(config: RunConfig) -> Iterator[RunConfig]:
    """Yields the layout with loss chunks and with embedding and output layer as units of FSDP2,
    which save memory, as far as the user has fixed none of these.

    The variants, their other stages, the savers of both and of those have every combination once.
    """
    if config.data_parallel.fsdp_memory_efficient_wrapping:
        return
    training = config.training
    tokens = config.data.seq_length // config.parallel.context_parallel_size
    if training.loss_chunk_size is None:
        for size in LOSS_CHUNKS:
            if size < tokens * training.micro_batch_size:
                yield config.with_fields({LOSS_CHUNK: size})
    if config.data_parallel.use_torch_fsdp2:
        yield config.with_fields({WRAPPING: True})


def _ends(problem: Problem, size: int, virtual: int) -> list[Row]:
    """Returns the fields of every cut into as many virtual stages, the most even one first.

    No rank holds more layers than all would if the output layer were layers too, or one more than
    in the most even cut: its computation delays the last rank, its gradients the reduction, and
    most micro-batches wait on the first rank. The ranks between may hold one more still.
    """
    fixed, asked = _given(problem, VIRTUAL), _given(problem, ENDS)
    if size == 1 or not fixed.keys().isdisjoint(NUMBERS[1:]):
        return [fixed]
    base, layers = problem.base, problem.base.model.num_layers
    virtual = fixed.get(VIRTUAL[0], virtual)
    cuts = [
        (cut, {VIRTUAL[0]: virtual, **ends})
        for cut in _cuts(layers, size, virtual)
        if (ends := dict(zip(ENDS, cut, strict=False))).items() >= asked.items()
    ]
    if not cuts:
        return []
    sizes = Sizes(model=base.model, micro_batch_size=1, seq_length=base.data.seq_length)
    head = logits_flops(replace(sizes, padded_vocab_size=base.tokenizer.true_vocab_size))
    # Twice: a network also takes long to reduce the gradients of the first and the last rank.
    worth = -(-2 * head * layers // forward_flops(sizes))
    most = max(-(-(layers + worth) // size), max(cuts[0][0]) + 1)
    return [
        ends if len({*cut}) > 1 else {VIRTUAL[0]: virtual}
        for cut, ends in cuts
        if max(cut) <= most or max(cut) == cut[2] == most + 1
    ]


@cache
def _cuts(layers: int, size: int, virtual: int) -> list[tuple[int, int, int]]:
    """Returns the layers of the first, the last and each other rank in every cut, the most even one
    first. Of two ranks the larger one counts as another one, too."""
    found = [
        (rest - last, last, each or max(rest - last, last))
        for each in (range(virtual, layers, virtual) if size > 2 else [0])
        for rest in [layers - (size - 2) * each]
        for last in range(virtual, rest, virtual)
        if rest % virtual == 0
    ]
    return sorted(found, key=lambda cut: (max(cut), -cut[2], abs(cut[0] - cut[1])))


def _kinds(problem: Problem, row: Row) -> Iterator[Row]:
    """Yields the kinds of data parallelism that have the flags that the user has fixed.

    FSDP2 gathers the weights of a stage again for each micro-batch of a pipeline. The two are
    tried together only if the user fixes one of them, or if nothing else fits.
    """
    fixed = _given(problem, DATA_PARALLEL)
    if problem.num_ranks == row[TENSOR] * row[PIPELINE]:
        yield fixed
        return
    in_pipeline = row[PIPELINE] > 1 and PIPELINE not in problem.fixed and not fixed
    for kind, flags in KINDS.items():
        if flags.items() >= fixed.items() and not (kind == FSDP2 and in_pipeline):
            yield flags


def _instances(problem: Problem, row: Row) -> Iterator[Row]:
    """Yields one instance of the states that are shared out, and then one for each node of a stage:
    gathers stay inside nodes."""
    yield {INSTANCES: 1}
    nodes = problem.num_ranks // (row[PIPELINE] * problem.machine.ranks_per_node)
    if nodes > 1 and any(row.get(name) for name in DATA_PARALLEL):
        yield {INSTANCES: nodes}


def _spreads(problem: Problem, row: Row) -> Iterator[Row]:
    """Yields the ways to spread experts over ranks.

    Each is whole on one rank, or shared by the tensor-parallel ranks, which helps more only where
    ranks cannot have fewer of them. FSDP2 spreads none. Each row goes alone only where that may
    send less than all tokens to every rank.
    """
    size_asked, share_asked, kind_asked = map(problem.fixed.get, EXPERTS)
    model, tensor = problem.base.model, row[TENSOR]
    experts = 1 if row.get("use_torch_fsdp2") else model.num_experts or 1
    ranks = problem.num_ranks // (row[PIPELINE] * row[INSTANCES])
    fewest = 1 if experts > 1 else tensor
    for size in [size_asked] if size_asked else range(1, experts + 1):
        kinds = ("allgather", "alltoall")[: 1 + (size > model.moe_router_topk)]
        shares = {tensor, fewest} if size in (1, experts, size_asked) else {fewest}
        for shared in [share_asked] if share_asked else shares:
            if experts % size == ranks % (size * shared) == 0:
                for kind in [kind_asked] if kind_asked else kinds:
                    yield dict(zip(EXPERTS, (size, shared, kind), strict=True))


def variants(problem: Problem, config: RunConfig) -> Iterator[RunConfig]:
    """Yields a layout of `layouts` with every exchange, and without sequence parallelism too, as
    far as the user has fixed none of them."""
    parallel = config.parallel
    is_open = parallel.context_parallel_size > 1 and EXCHANGE not in problem.fixed
    ways = _ways(problem) if is_open else (parallel.cp_comm_type,)
    without = parallel.sequence_parallel and SEQUENCE not in problem.fixed
    for row in itertools.product(ways, (parallel.sequence_parallel, False)[: 1 + without]):
        yield from _possible(problem, config, dict(zip((EXCHANGE, SEQUENCE), row, strict=True)))


def _micro_batches(problem: Problem, row: Row) -> Iterator[Row]:
    samples = problem.num_ranks // (row[TENSOR] * row[CONTEXT] * row[PIPELINE]) or 1  # of one each
    for size in MICRO_BATCH_SIZES:
        if (problem.base.training.global_batch_size or size * samples) % (size * samples) == 0:
            yield {MICRO_BATCH: size}


# In the order in which the rows need each other. `savers` has other values of the last of them.
DIMENSIONS: Sequence[tuple[Sequence[str], Callable[[Problem, Row], Iterable[Row]]]] = (
    # No tensor-parallel group crosses the border of a node.
    (
        (TENSOR,),
        lambda problem, _: _divisors(
            TENSOR, min(problem.num_ranks, problem.machine.ranks_per_node), problem.num_ranks
        ),
    ),
    ((CONTEXT,), _contexts),
    (
        (PIPELINE,),
        lambda problem, row: _divisors(
            PIPELINE,
            problem.num_ranks // (row[TENSOR] * row[CONTEXT]),
            problem.base.model.num_layers,
        ),
    ),
    (
        (SEQUENCE,),
        lambda problem, row: [
            {
                SEQUENCE: row[TENSOR] > 1
                and problem.base.data.seq_length % (row[TENSOR] * row[CONTEXT]) == 0
            }
        ],
    ),
    ((EXCHANGE,), lambda problem, row: [{EXCHANGE: _ways(problem)[0]} if row[CONTEXT] > 1 else {}]),
    ((), lambda problem, row: _ends(problem, row[PIPELINE], 1)[:1]),
    ((), _kinds),
    ((RESHARD,), lambda _, row: [{}, {RESHARD: False}] if row.get(DATA_PARALLEL[1]) else [{}]),
    ((INSTANCES,), _instances),
    ((), _spreads),
    ((MICRO_BATCH,), _micro_batches),
    ((WRAPPING, LOSS_CHUNK), lambda *_: [{}]),
)
