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
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone may not be installed

from benchmarks.outcomes import EQUAL, ROUNDED, alone, verdict
from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign import Foreign, Outcome, Prepare, train
from tests.support.foreign_families import FAMILIES, VARIANTS
from tests.support.foreign_layers import LAYERS
from tests.support.foreign_wrapped import (
    compile_around,
    compile_forwards,
    compile_layers,
    train_compiled,
    train_in_ddp,
)
from tests.support.odd_state import CONTEXTS, STATES
from tests.support.ranks import run_ranks

BEGIN, END = "<!-- tables of benchmarks/who_is_right.py -->", "<!-- end of the tables -->"
MODELS = {**FAMILIES, **VARIANTS, **LAYERS, **STATES, **CONTEXTS}
ROUNDING = 1e-3  # relative; a gradient further off is wrong
BF16_ROUNDING = 2.0**-5  # under autocast
WAYS_OF = "BERT"  # the model of the table of ways to train: no cache, no side channel
NOT_APPLICABLE = "-"
REFUSED_TOO = "error, as without"
REFUSED_BY_PLAIN = "a saved result that it writes afterwards"
PLAIN_REFUSES = "weights written before backward"


@dataclass(frozen=True)
class Engine:
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
    names = tuple(kwargs)

    def by_position(*values):
        return forward(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

    return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=True)


def _enable(model, foreign, *, use_reentrant):
    inner = next(
        module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)
    )
    inner.gradient_checkpointing_enable(
        None if use_reentrant is None else {"use_reentrant": use_reentrant}
    )


def _policy(model, foreign, *, text, verify="first"):
    for name in foreign.lists:
        apply_policy_(model, layers_fqn=name, policy=text, verify=verify)


ENGINES = (
    Engine("torch, non-reentrant", partial(_wrap_layers, use_reentrant=False)),
    Engine("torch, reentrant", partial(_wrap_layers, use_reentrant=True)),
    Engine("transformers", partial(_enable, use_reentrant=None), only_transformers=True),
    Engine("transformers, reentrant", partial(_enable, use_reentrant=True), only_transformers=True),
    Engine("ours, `full`", partial(_policy, text="*:full")),
    Engine("ours, `full`, verify", partial(_policy, text="*:full", verify=True)),
    Engine("ours, `ops(matmul)`", partial(_policy, text="*:ops(matmul)")),
    Engine("ours, `full@host`", partial(_policy, text="*:full@host")),
)
OURS = "ours"  # the last columns, which the tables show as one
NUM_OTHERS = sum(not engine.name.startswith(OURS) for engine in ENGINES)


@dataclass(frozen=True)
class Row:
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


def cells(row):
    """Returns the cells of the row, one for each engine."""
    expected = None if row.plain_refuses else alone(partial(row.run, None), row.seconds)
    assert expected is None or isinstance(expected, Outcome), f"{row.name}: {expected}"
    return [cell(row, engine, expected) for engine in ENGINES]


def cell(row, engine, expected):
    """Returns one cell. expected: the outcome of plain torch, or None if it ends in an error."""
    if engine.only_transformers and not _is_of_transformers(row.foreign):
        return NOT_APPLICABLE
    found = alone(partial(row.run, lambda model: engine.put(model, row.foreign)), row.seconds)
    if isinstance(found, str):
        return REFUSED_TOO if expected is None else found
    return "**silent**" if expected is None else verdict(expected, found, row.tolerance)


def _is_of_transformers(foreign):
    return any(foreign is model for model in (*FAMILIES.values(), *VARIANTS.values()))


def _trained(names):
    for name in names:
        yield Row(
            name,
            MODELS[name],
            partial(train, MODELS[name], "two micro-batches"),
            plain_refuses=name == REFUSED_BY_PLAIN,
        )


def _ways():
    model = MODELS[WAYS_OF]
    for way, name in WAYS.items():
        yield Row(
            name,
            model,
            partial(train, model, way),
            tolerance=BF16_ROUNDING if "bf16" in way else ROUNDING,
            plain_refuses=way == PLAIN_REFUSES,
        )
    for name, other, options in (
        ("DDP", model, {}),
        ("DDP, static_graph", model, dict(static=True)),
        ("DDP, find_unused_parameters", model, dict(find_unused=True)),
        (
            "the same, a layer with an output that nobody reads",
            LAYERS["an output that nobody reads"],
            dict(find_unused=True),
        ),
    ):
        yield Row(
            name,
            other,
            partial(_in_ranks, other, dict(dict(find_unused=False), **options)),
            seconds=300,
        )
    chain = LAYERS["a tensor"]
    for name, other, wrap, first in (
        (f"torch.compile around {WAYS_OF}", model, compile_around, False),
        ("torch.compile around a chain of layers", chain, compile_around, False),
        ("torch.compile around each layer, engine included", chain, compile_layers, False),
        ("the engine around compiled forwards", chain, compile_forwards, True),
    ):
        yield Row(
            name,
            other,
            partial(train_compiled, other, wrap=wrap, backend="aot_eager", first=first),
            seconds=600,
        )


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
    result = run_ranks(
        lambda rank, size: train_in_ddp(foreign, prepare, **options), 2, detail=False, timeout=60
    )[0]
    assert isinstance(result, Outcome)
    return result


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
        (engine.name, [str(sum(kind(line[number]) for line in every)) for kind in kinds.values()])
        for number, engine in enumerate(ENGINES)
    ]
    parts = [f"{versions}, on a CPU. Rows by outcome:\n", _table(["engine", *kinds], counts)]
    for title, (what, _) in TABLES.items():
        shown = [
            number
            for number in range(NUM_OTHERS)
            if any(line[number] != NOT_APPLICABLE for _, line in found[title])
        ]
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
    for name, way in (("a tensor", "two micro-batches"), ("BERT", "bf16 autocast")):
        train(
            MODELS[name],
            way,
            lambda model, name=name: _policy(model, MODELS[name], text="0:ops(matmul)"),
        )
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
    chosen = parser.parse_args(arguments)
    page = chosen.output.read_text() if chosen.output and chosen.output.is_file() else ""
    if chosen.output and not (BEGIN in page and END in page):
        parser.error(f"--output {chosen.output} is no page that holds the marks {BEGIN} and {END}")
    torch.set_num_threads(1)  # the ranks are forks of this process
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    text = tables()
    if chosen.output:
        chosen.output.write_text(f"{page.split(BEGIN)[0]}{BEGIN}\n{text}{END}{page.split(END)[1]}")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
