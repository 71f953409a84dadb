"""Finds which recomputation engine trains which model correctly, for docs/who-is-right.md.

Each cell is one training of a small random model by one engine. It is compared to the bit with the
same training without recomputation: losses, gradients, buffers, and the final state of torch's
generator. The models are those of the tests (tests/support/foreign*.py). Nothing is timed, and the
text is the same on every run.

    python benchmarks/who_is_right.py
        prints the tables
    python benchmarks/who_is_right.py --output docs/who-is-right.md
        replaces the tables of the page, between its two marks
"""

import argparse
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, ".")  # the root of the clone, which may not be installed

from megatron_lite.recompute.apply import apply_policy_
from tests.support.equality import difference
from tests.support.foreign import Foreign, Outcome, Prepare, count_unequal, train
from tests.support.foreign_families import FAMILIES, VARIANTS
from tests.support.foreign_layers import LAYERS
from tests.support.foreign_wrapped import (
    compile_around,
    compile_forwards,
    compile_layers,
    train_compiled,
    train_in_ddp,
)
from tests.support.forks import status_of_fork
from tests.support.odd_state import CONTEXTS, STATES
from tests.support.ranks import RankFailure, run_ranks

BEGIN, END = "<!-- tables of benchmarks/who_is_right.py -->", "<!-- end of the tables -->"
OF_TRANSFORMERS = [*FAMILIES.values(), *VARIANTS.values()]
MODELS = {**FAMILIES, **VARIANTS, **LAYERS, **STATES, **CONTEXTS}
ROUNDING = 1e-3  # relative; a gradient further off is wrong
BF16_ROUNDING = 2.0**-5  # under autocast
WAYS_OF = "BERT"  # the model of the table of ways to train: no cache, no side channel
EQUAL = "equal"
ROUNDED = "equal up to rounding"
NOT_APPLICABLE = "-"
REFUSED_TOO = "error, as without"
REFUSED_BY_PLAIN = "a saved result that it writes afterwards"
PLAIN_REFUSES = "weights written before backward"


class Engine(NamedTuple):
    """An engine that is compared.

    put: puts the engine on a model.
    only_transformers: whether the engine is a method that only models of transformers have.
    """

    name: str
    put: Callable[[nn.Module, Foreign], None]
    only_transformers: bool = False


def _wrap_layers(model, foreign, *, use_reentrant):
    for name in foreign.lists:
        for layer in dict.fromkeys(model.get_submodule(name)):
            layer.forward = partial(_checkpointed, layer.forward, use_reentrant)


def _checkpointed(forward, use_reentrant, *args, **kwargs):
    """Calls `forward` under torch's checkpoint.

    The reentrant mode takes no keyword arguments. They are passed by position, so that it sees
    their tensors.
    """
    if not use_reentrant:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    n = len(args)

    def by_position(*values):
        return forward(*values[:n], **dict(zip(kwargs, values[n:], strict=True)))

    return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=True)


def _enable(model, foreign, *, options):
    inner = next(
        module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)
    )
    inner.gradient_checkpointing_enable(options)


def _policy(model, foreign, *, text, verify="first"):
    for name in foreign.lists:
        apply_policy_(model, layers_fqn=name, policy=text, verify=verify)


ENGINES = (
    Engine("torch, non-reentrant", partial(_wrap_layers, use_reentrant=False)),
    Engine("torch, reentrant", partial(_wrap_layers, use_reentrant=True)),
    Engine("transformers", partial(_enable, options=None), True),
    Engine("transformers, reentrant", partial(_enable, options={"use_reentrant": True}), True),
    Engine("ours, `full`", partial(_policy, text="*:full")),
    Engine("ours, `full`, verify", partial(_policy, text="*:full", verify=True)),
    Engine("ours, `ops(matmul)`", partial(_policy, text="*:ops(matmul)")),
    Engine("ours, `full@host`", partial(_policy, text="*:full@host")),
)
OURS = "ours"  # the last columns, which the tables show as one
NUM_OTHERS = sum(not engine.name.startswith(OURS) for engine in ENGINES)


class Row(NamedTuple):
    """A row of the tables.

    run: returns the outcome of the model that `prepare` has changed.
    tolerance: the relative error above which a gradient or loss is wrong.
    plain_refuses: whether plain torch ends in an error. An engine should end in an error too.
    seconds: the processor time after which a training counts as endless.
    """

    name: str
    foreign: Foreign
    run: Callable[[Prepare | None], Outcome]
    tolerance: float = ROUNDING
    plain_refuses: bool = False
    seconds: int = 20


def alone(training, seconds):
    """Returns the outcome of the training, or a text about the error in which it ends.

    The training runs in its own process, because some engines never return.
    """

    def run():
        # The limit is on processor time: on a busy machine a training does not count as endless.
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds + 5))
        try:
            found = training()
        except Exception as error:  # any error of an engine is the content of its cell
            found = f"error: {short(error)}"
        file.write(pickle.dumps(found))
        file.flush()

    with tempfile.TemporaryFile() as file:
        status = status_of_fork(run)
        file.seek(0)
        if not status:
            return pickle.load(file)
    # A stack overflow or the time limit: the size of the stack decides which comes first.
    if status in (-signal.SIGXCPU, -signal.SIGSEGV):
        return "**hangs, or the process dies**"
    return f"error: the process ends with {status}"


def verdict(expected, found, tolerance):
    """Returns the comparison in a few words. Bold text means that the training is wrong."""
    counts, parts = count_unequal(expected, found, tolerance), []
    rounded = counts["rounded"] > 0 or not all(map(torch.equal, expected.losses, found.losses))
    if max(map(difference, expected.losses, found.losses)) > tolerance:
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
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[-1 if isinstance(error, RankFailure) else 0].removeprefix("RuntimeError: ")
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


def cells(row):
    """Returns the cells of the row, one for each engine."""
    expected = None if row.plain_refuses else alone(partial(row.run, None), row.seconds)
    assert expected is None or isinstance(expected, Outcome), f"{row.name}: {expected}"
    return [cell(row, engine, expected) for engine in ENGINES]


def cell(row, engine, expected):
    """Returns one cell. expected: the outcome of plain torch, or None if it ends in an error."""
    if engine.only_transformers and row.foreign not in OF_TRANSFORMERS:
        return NOT_APPLICABLE
    found = alone(partial(row.run, lambda model: engine.put(model, row.foreign)), row.seconds)
    if isinstance(found, str):
        return REFUSED_TOO if expected is None else found
    return "**silent**" if expected is None else verdict(expected, found, row.tolerance)


def _trained(names):
    for name in names:
        run = partial(train, MODELS[name], "two micro-batches")
        yield Row(name, MODELS[name], run, plain_refuses=name == REFUSED_BY_PLAIN)


def _ways():
    model = MODELS[WAYS_OF]
    for way, name in WAYS.items():
        tolerance = BF16_ROUNDING if "bf16" in way else ROUNDING
        yield Row(name, model, partial(train, model, way), tolerance, way == PLAIN_REFUSES)
    unread = LAYERS["an output that nobody reads"]
    for name, other, options in (
        ("DDP", model, dict(find_unused=False)),
        ("DDP, static_graph", model, dict(find_unused=False, static=True)),
        ("DDP, find_unused_parameters", model, dict(find_unused=True)),
        ("the same, a layer with an output that nobody reads", unread, dict(find_unused=True)),
    ):
        yield Row(name, other, partial(_in_ranks, other, options), seconds=300)
    chain = LAYERS["a tensor"]
    for name, other, wrap in (
        (f"torch.compile around {WAYS_OF}", model, compile_around),
        ("torch.compile around a chain of layers", chain, compile_around),
        ("torch.compile around each layer, engine included", chain, compile_layers),
        ("the engine around compiled forwards", chain, compile_forwards),
    ):
        run = partial(train_compiled, other, wrap=wrap, backend="aot_eager")
        yield Row(name, other, partial(run, first=wrap is compile_forwards), seconds=600)


WAYS = {
    "two forwards in flight": "two forwards, the later backward first",
    "bf16 autocast": "bf16 autocast",
    "adapters": "everything frozen but adapters (LoRA)",
    "adapters under bf16 autocast": "adapters under bf16 autocast",
    "backward twice": "backward twice (retain_graph)",
    "torch.autograd.grad": "torch.autograd.grad",
    "functional_call": "functional_call with other weights",
    "second-order gradients": "create_graph: a penalty on gradients",
    PLAIN_REFUSES: "weights changed before backward: plain torch refuses",
}


def _in_ranks(foreign, options, prepare):
    """Returns the outcome of the first of two ranks that train under DDP."""
    return run_ranks(
        lambda rank, size: train_in_ddp(foreign, prepare, **options), 2, detail=False, timeout=60
    )[0]


TABLES = {
    "Models of transformers, called by default": ("model", lambda: _trained([*FAMILIES])),
    "The same where more goes into a layer, or more of it into the loss": (
        "model",
        lambda: _trained([*VARIANTS]),
    ),
    "Layers of plain torch": ("a layer returns, holds, takes or does", lambda: _trained([*LAYERS])),
    "State that a replay must restore or refuse": ("a layer has", lambda: _trained([*STATES])),
    "What surrounds the forward, and not backward": (
        "the caller sets",
        lambda: _trained([*CONTEXTS]),
    ),
    f"Ways to train ({WAYS_OF} unless said)": ("way", _ways),
}


def tables():
    """Trains every row, and returns Markdown."""
    _warm_up()
    return markdown(
        {title: [(row.name, cells(row)) for row in rows()] for title, (_, rows) in TABLES.items()}
    )


def markdown(found):
    """Returns a summary, and a table for each kind of row.

    found: by the title of each table, the name of every row and its cells, one for each engine.
    """
    every = [each for lines in found.values() for _, each in lines]
    kinds = {
        "equal to the bit": lambda text: text in (EQUAL, REFUSED_TOO),
        "equal up to rounding": lambda text: text == ROUNDED,
        "an error": lambda text: text.startswith("error: "),
        "silently other": lambda text: text.startswith("**"),
        "not applicable": lambda text: text == NOT_APPLICABLE,
    }
    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    counts = [
        (engine.name, [str(sum(map(kind, column))) for kind in kinds.values()])
        for engine, *column in zip(ENGINES, *every, strict=True)
    ]
    parts = [f"{versions}, on a CPU. Rows by outcome:\n", _table(["engine", *kinds], counts)]
    for title, (what, _) in TABLES.items():
        columns = list(zip(*(line for _, line in found[title]), strict=True))[:NUM_OTHERS]
        shown = [number for number, cells in enumerate(columns) if {*cells} != {NOT_APPLICABLE}]
        head = [what, *(ENGINES[number].name for number in shown), OURS]
        lines = [
            (name, [*(line[number] for number in shown), merged(line[NUM_OTHERS:])])
            for name, line in found[title]
        ]
        alike = [name for name, cells in lines if set(cells) == {EQUAL}]
        parts += [f"### {title}\n", _table(head, [line for line in lines if line[0] not in alike])]
        if alike:
            parts += [f"Equal in every engine: {'; '.join(alike)}.\n"]
    return "\n".join(parts)


def merged(line):
    """Returns one cell for all policies of ours: what most of them have, and each exception."""
    [(most, _)] = Counter(line).most_common(1)
    names = (engine.name.removeprefix(f"{OURS}, ") for engine in ENGINES[NUM_OTHERS:])
    others = [f"{name}: {text}" for name, text in zip(names, line, strict=True) if text != most]
    return "; ".join([most, *others])


def _warm_up():
    """Imports modules once that each forked process would import again.

    The imports of a selective checkpoint and of a compiler take seconds.
    """
    model = MODELS[WAYS_OF]
    train(model, "bf16 autocast", lambda found: _policy(found, model, text="0:ops(matmul)"))
    train_compiled(MODELS["a tensor"], None, wrap=compile_layers, backend="aot_eager")


def _table(head, rows):
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments=None):
    """Prints the tables, or writes them into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, help="a page with the two marks between which the tables stand"
    )
    output = parser.parse_args(arguments).output
    page = output.read_text() if output else BEGIN + END
    before, rest = page.split(BEGIN)
    torch.set_num_threads(1)  # the ranks are forks of this process
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = tables()
    if output:
        output.write_text(f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
