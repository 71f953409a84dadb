"""Makes something happen to a rank at a named place of a run.

The rank calls `happens(place, action, iteration=3)` before its run starts.
"""

import fcntl
import math
import time

from megatron_lite.checkpointing import saver
from megatron_lite.data import gpt_dataset as gpt
from megatron_lite.data import token_datasets
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.tensor_parallel import layers as linear
from megatron_lite.training import build_trainer as build
from megatron_lite.training import loop
from megatron_lite.training.step import StageRunner

# The places, and the function that is patched for each. The action runs before its first call in
# the iteration.
MATMUL = linear._ParallelMatmul
PLACES = {
    "forward": (MATMUL, "forward"),
    "backward": (MATMUL, "backward"),
    "replay": (MATMUL, "forward"),
    "step": (loop, "train_step"),
    "evaluation": (StageRunner, "evaluate"),
    "saving": (saver, "write_tensors"),
    "index": (gpt, "build_sample_index"),
    "model": (build, "build_stages"),
}


def happens(place, action, *, iteration=0):
    """Makes the run call `action()` once, at the place, during the iteration.

    iteration: counted from the start of the run. 0 is before the first.
    """
    steps, done = [0], [False]
    owner, name = PLACES[place]
    original = getattr(owner, name)

    def patched(*args, **options):
        if not done[0] and steps[0] == iteration and is_recomputing() == (place == "replay"):
            done[0] = True
            action()
        return original(*args, **options)

    setattr(
        owner,
        name,
        staticmethod(patched) if place in ("forward", "backward", "replay") else patched,
    )
    train_step = loop.train_step

    def counted(*args, **options):
        steps[0] += 1
        return train_step(*args, **options)

    loop.train_step = counted


def at(rank, place, action, *, iteration=0):
    """Returns a `prepare` of `program` that makes it happen to one rank."""
    return lambda own: happens(place, action, iteration=iteration) if own == rank else None


def builds_second(cache):
    """Makes this rank wait before its indices until another rank builds an index in `cache`."""
    build_split = token_datasets._build_split

    def second(*args, **options):
        # The file is there a moment before its lock is taken; a builder that dies holds it no more.
        until = math.inf
        while time.monotonic() < until:
            locks = [*cache.glob("*.lock")]
            if any(map(_is_held, locks)):
                break
            if locks:
                until = min(until, time.monotonic() + 1)
            time.sleep(0.001)
        return build_split(*args, **options)

    token_datasets._build_split = second


def _is_held(lock):
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
