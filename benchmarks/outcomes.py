"""The outcome of a training in a process of its own, beside the outcome that is right."""

import multiprocessing
import pickle
import re
import resource
import signal

import torch

from tests.support.foreign import count_unequal, error_of
from tests.support.ranks import RankFailure

EQUAL = "equal"
ROUNDED = "equal up to rounding"


def alone(training, seconds):
    """Returns the outcome of the training, or a text about the error in which it ends.

    The training runs in its own process, because some engines never return.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(training, seconds, writer)
    )
    process.start()
    writer.close()
    try:
        found = pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join()
        # A stack overflow or the time limit: the size of the stack decides which comes first.
        endless = process.exitcode in (-signal.SIGXCPU, -signal.SIGSEGV)
        found = (
            "**hangs, or the process dies**"
            if endless
            else f"error: the process ends with {process.exitcode}"
        )
    process.join()
    reader.close()
    return found


def _send(training, seconds, writer):
    # The limit is on processor time, so on a busy machine a training does not count as endless.
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds + 5))
    try:
        found = training()
    except Exception as error:  # any error of an engine is the content of its cell
        found = f"error: {short(error)}"
    writer.send_bytes(pickle.dumps(found))


def verdict(expected, found, tolerance):
    """Returns the comparison in a few words. Bold text means that the training is wrong."""
    counts, parts = count_unequal(expected, found, tolerance), []
    rounded = counts["rounded"] > 0 or not all(map(torch.equal, expected.losses, found.losses))
    if any(
        error_of(one, other) > tolerance
        for one, other in zip(expected.losses, found.losses, strict=True)
    ):
        parts.append("loss wrong")
    trained = sum(gradient is not None for gradient in expected.gradients.values())
    parts += [f"{counts[kind]} of {trained} {kind}" for kind in ("wrong", "lost") if counts[kind]]
    if counts["made up"]:
        parts.append(f"{counts['made up']} zeros for None")
    changed = sum(
        not torch.equal(buffer, found.buffers[name]) for name, buffer in expected.buffers.items()
    )
    if changed:
        parts.append(f"{changed} of {len(expected.buffers)} buffers differ")
    if not torch.equal(expected.generator, found.generator):
        parts.append("the generator ends elsewhere")
    if parts:
        return f"**{', '.join(parts)}**"
    return ROUNDED if rounded else EQUAL


def short(error):
    """Returns the error's message in at most 60 characters, without memory addresses."""
    for pattern, words in SHORT.items():
        if re.search(pattern, str(error), re.DOTALL):
            return words
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[-1] if isinstance(error, RankFailure) else (lines or [type(error).__name__])[0]
    text = text.removeprefix("RuntimeError: ")
    text = re.sub(r"0x[0-9a-f]+", "..", text).replace("|", "/")
    return text if len(text) <= 60 else text[:57].rsplit(" ", 1)[0] + " .."


# Long messages of torch, as patterns, and their meaning here in a few words.
SHORT = {
    "a replay is not what its forward": "the replay is not what its forward was",
    r"size of tensor a .* must match|shape '.*' is invalid": "other shapes inside of the replay",
    r"backward through the graph a second time": "backward through a graph that is gone",
    r"A different number of tensors": "the replay saves another number of tensors",
    r"modified by an inplace operation|modified in-place since": "a tensor was written in place",
    r"is being (modified inplace|used in an in-place)": "an argument must not be written in place",
    r"does not require grad and does not have a grad_fn": "the loss has no gradient",
    r"checkpoint is incompatible with": "only with backward(), not autograd.grad()",
    r"has been marked as ready twice|mark a variable ready only once": "DDP gets a gradient twice",
    r"'tuple' object has no attribute": "the output came back as a plain tuple",
    r"during backward but not found|invocation index": "the replay runs another operator",
}
