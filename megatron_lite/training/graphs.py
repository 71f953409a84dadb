"""A training step as one CUDA graph: `--cuda-graph-impl full_iteration`.

A graph launches the kernels of a captured step again, at the same addresses and without Python. So
whatever differs from step to step lies in memory that stays where it is: the micro-batches, the
learning rates and the factors of loss masks (the arguments of `train_step`), the loss scale and the
optimizer's states.

    steps 1 to N     run without a graph (--cuda-graph-warmup-steps): kernels are compiled and
                     chosen, and kept bytes and the peak measured. In the last of these steps a
                     rehearsal notes where its random numbers come from.
    step N + 1       is captured, which computes nothing, and replayed
    later steps      are replayed, on new inputs

A step with another number of micro-batches, while the batch grows, is rehearsed and captured anew.
Its graph takes the place of the one before, and its memory.

The random numbers of a CUDA generator depend on its seed and its offset alone, and a graph reads
both from memory as it is replayed, for each state that is registered with it. A recomputation sets
the generator back to where its forward drew. A graph cannot do that, so each place to which the
rehearsal set the generator has a registered state of its own, unless another state stands there.
Each state begins a step at its own distance from where the step begins.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.compiled import first_line
from megatron_lite.parallel.rng import RngSnapshot, RngStreams, default_generator
from megatron_lite.parallel.torch_internals import tree_leaves, tree_map_only

from .batches import Batches
from .observe import Look
from .out_of_memory import is_out_of_memory
from .step import StepResult

# The first step measures the kept bytes, the second one the peak, the third one is the rehearsal.
LEAST_WARMUP = 3
Step = Callable[..., StepResult]
Inputs = dict[str, Any]  # what differs from step to step, on the device: arguments of `train_step`
Place = tuple[int, int]  # of a generator: its seed and its offset


class Capture:
    """One CUDA graph. The tests have a stand-in for it on a CPU.

    All graphs of a run share the pool's memory: the run replays only the last one, and copies its
    results."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
        self._generator = default_generator(device)
        self._graph, self._stream, self._pool = torch.cuda.CUDAGraph(), stream, pool

    def register(self) -> Any:
        """Returns a further state of the generator. To be called before `record`."""
        state = self._generator.clone_state()
        self._graph.register_generator_state(state)
        return state

    def draw_from(self, state: Any) -> None:
        """Makes the following operations draw from this state. To be called within `record`."""
        self._generator.graphsafe_set_state(state)

    def record(self, function: Callable[[], StepResult]) -> StepResult:
        """Captures what the function launches, and returns its result, which a replay fills."""
        own = self._generator.graphsafe_get_state()
        # NCCL's own threads ask for events meanwhile, which "global" would forbid.
        around = torch.cuda.graph(
            self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with around:
                return function()
        finally:
            self._generator.graphsafe_set_state(own)

    def replay(self) -> None:
        self._graph.replay()


class Rehearsal(NamedTuple):
    """Where the random numbers of a step come from.

    starts, ends: the offsets of the streams before and after the step, by their seeds.
    places: where the generator stood at the start of the step, before and after each time that the
        step set it, and at the end. It drew between the first and the second of them, and so on.
    reads: the states that the step read, in order.
    """

    starts: dict[int, int]
    places: list[Place]
    reads: list[Tensor]
    ends: dict[int, int]


@contextmanager
def rehearsed(rng: RngStreams) -> Iterator[Rehearsal]:
    """Notes where random numbers come from while the block runs a step without a graph."""
    generator = rng.generator
    found = Rehearsal(_offsets(rng.snapshot()), [_place(generator.get_state())], [], {})

    def get_state() -> Tensor:
        found.reads.append(generator.get_state())
        return found.reads[-1]

    def set_state(state: Tensor) -> None:
        found.places.extend((_place(generator.get_state()), _place(state)))
        generator.set_state(state)

    rng.generator = SimpleNamespace(get_state=get_state, set_state=set_state)
    try:
        yield found
    finally:
        rng.generator = generator
    found.places.append(_place(generator.get_state()))
    found.ends.update(_offsets(rng.snapshot()))


def captured(
    step: Step, inputs: Inputs, rehearsal: Rehearsal, rng: RngStreams, capture: Capture
) -> Callable[[Inputs], StepResult]:
    """Captures a step. Returns what runs it on new inputs, of the shapes of the captured ones.

    rehearsal: a step of as many micro-batches, on this generator.
    """
    inputs = tree_map_only(Tensor, Tensor.clone, inputs)
    places = rehearsal.places
    begins, numbers = _shared_states(zip(places[::2], places[1::2], strict=True))
    states = [(capture.register(), seed, offset) for seed, offset in begins]

    def run() -> StepResult:
        """Runs the step, which reads of the generator what the rehearsal did."""
        reads, turns, generator = iter(rehearsal.reads), iter(numbers), rng.generator

        def set_state(_: object = None) -> None:
            number = next(turns)
            if number is not None:
                capture.draw_from(states[number][0])

        rng.generator = SimpleNamespace(get_state=reads.__next__, set_state=set_state)
        try:
            set_state()
            return step(**inputs)
        finally:
            rng.generator = generator

    with _named_where_it_fails():
        result = capture.record(run)

    def replay(new_inputs: Inputs) -> StepResult:
        for place, new in zip(tree_leaves(inputs), tree_leaves(new_inputs), strict=True):
            if isinstance(place, Tensor):
                assert place.shape == new.shape, (place.shape, new.shape)
                place.copy_(new)
        before, starts, ends = rng.snapshot(), rehearsal.starts, rehearsal.ends
        now = {name: _place(state) for name, state in before.states.items()}
        offsets = dict(now.values())
        for state, seed, offset in states:
            state.set_state(_state(seed, offsets[seed] + offset - starts[seed]))
        capture.replay()
        after = {
            name: _state(seed, offset + ends[seed] - starts[seed])
            for name, (seed, offset) in now.items()
        }
        rng.restore(RngSnapshot(before.current, after))
        copy: StepResult = tree_map_only(Tensor, Tensor.clone, result)
        return copy

    return replay


class Recorder:
    """Runs the steps of a run, and captures them once they are warm.

    step: `train_step`, but for its runner and its optimizer.
    warmup_steps: --cuda-graph-warmup-steps; fewer than LEAST_WARMUP count as so many.
    new_capture: returns a new, empty graph. None: a CUDA graph.
    """

    def __init__(
        self,
        step: Step,
        rng: RngStreams,
        *,
        warmup_steps: int = 0,
        new_capture: Callable[[], Capture] | None = None,
    ) -> None:
        self._step, self._rng, self._device = step, rng, rng.device
        self._stream: torch.cuda.Stream | None = None
        if new_capture is None:
            self._stream = torch.cuda.Stream(self._device)
            pool = torch.cuda.graph_pool_handle()
            new_capture = partial(Capture, self._device, self._stream, pool)
        self._new_capture = new_capture
        self._num_warm, self._count = max(warmup_steps, LEAST_WARMUP), 0
        self._rehearsal: Rehearsal | None = None
        self._replay: Callable[[Inputs], StepResult] | None = None

    def run(self, batches: Batches, *, look: Look | None = None, **others: Any) -> StepResult:
        """Runs `train_step`, as a graph if it can.

        look: only in the first two steps. others: the other arguments of `train_step`.
        """
        with self._on_its_stream():
            # A learning rate becomes a tensor.
            inputs: Inputs = tree_map_only((int, float), self._rate, others)
            inputs["batches"] = tuple(batches[number] for number in range(len(batches)))
            if len(batches) != self._count:
                self._count, self._rehearsal, self._replay = len(batches), None, None
            if self._num_warm > 0 or self._rehearsal is None:
                self._num_warm -= 1
                with rehearsed(self._rng) as self._rehearsal:
                    return self._step(**inputs, look=look)
            if self._replay is None:
                self._replay = captured(
                    self._step, inputs, self._rehearsal, self._rng, self._new_capture()
                )
            return self._replay(inputs)

    def _rate(self, rate: float) -> Tensor:
        dtype = torch.float32 if self._device.type == "cuda" else torch.float64
        return torch.full((), rate, dtype=dtype, device=self._device)

    @contextmanager
    def _on_its_stream(self) -> Iterator[None]:
        """Runs the block on the stream of the captures. What autograd holds from step to step then
        belongs to that stream already."""
        if self._stream is None:
            yield
            return
        around = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(around)
        with torch.cuda.stream(self._stream):
            yield
        around.wait_stream(self._stream)


@contextmanager
def _named_where_it_fails() -> Iterator[None]:
    """Turns an error in a capture into an InputError that names the operation."""
    try:
        yield
    except Exception as error:
        first: BaseException = error
        while isinstance(first.__context__, RuntimeError):  # the end of a capture fails as well
            first = first.__context__
        if isinstance(first, InputError) or is_out_of_memory(first):
            raise
        frames = traceback.extract_tb(first.__traceback__)
        own = [frame for frame in frames if "megatron_lite" in frame.filename] or frames
        raise InputError(
            f"--cuda-graph-impl: a CUDA graph cannot hold `{own[-1].line}` in {own[-1].name} "
            f"({first_line(first)}): leave the flag out (--cuda-graph-impl none)"
        ) from error


def _place(state: Tensor) -> Place:
    seed, offset = state.view(torch.int64).tolist()
    return seed, offset


def _state(seed: int, offset: int) -> Tensor:
    return torch.tensor([seed, offset]).view(torch.uint8)


def _offsets(snapshot: RngSnapshot) -> dict[int, int]:
    """Returns the offset of each stream by its seed. No two streams have one seed."""
    return dict(map(_place, snapshot.states.values()))


def _shared_states(
    stretches: Iterable[tuple[Place, Place]],
) -> tuple[list[Place], list[int | None]]:
    """Returns where each registered state begins, and the number of each stretch's state.

    A stretch goes on with the state that stands where it begins, if there is one. A stretch that
    draws nothing has none.
    """
    begins = list[Place]()
    standing: dict[Place, int] = {}
    numbers: list[int | None] = []
    for first, last in stretches:
        number = None
        if first != last:
            number = standing.pop(first, len(begins))
            if number == len(begins):
                begins.append(first)
            standing[last] = number
        numbers.append(number)
    return begins, numbers
