"""Converts weights between formats: `python -m megatron_lite.tools.convert --from hf --to
megatron-lite --load DIR --save DIR`.

The target appears complete, or not at all: a killed conversion can be run again. docs/convert.md
has the formats and the model families.
"""

import argparse
import inspect
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted
from megatron_lite.config.run_flags import Parser
from megatron_lite.parallel.signals import postponed

from .command import tool

SECONDS_A_LINE = 5.0  # of progress
FORMAT_HELP = {
    "hf": "a folder of Hugging Face: config.json, safetensors, tokenizer",
    "megatron-lite": "a checkpoint directory, the --save of a training run",
    "megatron": "a checkpoint of Megatron-LM with --ckpt-format torch",
    "megatron-dist": "a checkpoint of Megatron-LM with --ckpt-format torch_dist",
}


def formats() -> dict[str, ModuleType]:
    """Returns the modules of the formats by their names in FORMAT_HELP. Loads torch.

    Each has two functions. `source` opens weights of its format. It raises InputError if they are
    of another one. `write` writes weights to a path that does not exist yet. It can be told over
    how many ranks the files split the model (`tp_size`, `pp_size`), or the `family` of Hugging
    Face, if it has such a parameter.
    """
    from megatron_lite.convert import hf, native
    from megatron_lite.convert.megatron import dist, legacy

    return {"hf": hf, "megatron-lite": native, "megatron": legacy, "megatron-dist": dist}


def convert(args: argparse.Namespace) -> None:
    """Converts.

    Raises InputError for a fault in the flags, in the source or in the target. A signal ends it
    after the tensor that is being converted.
    """
    # Imported late: the module imports torch, which --help does not need.
    from megatron_lite.convert.target import check_absent

    known = formats()
    target = known[args.target]
    options = {}
    for flag, name, value, default in (
        ("--tensor-model-parallel-size", "tp_size", args.tensor_model_parallel_size, 1),
        ("--pipeline-model-parallel-size", "pp_size", args.pipeline_model_parallel_size, 1),
        ("--hf-family", "family", args.hf_family, None),
    ):
        if default == 1 and value < 1:
            raise InputError(f"{flag} must be at least 1 (got {value})")
        if name in inspect.signature(target.write).parameters:
            options[name] = value
        elif value != default:
            raise InputError(f"{flag} {value} does not apply to --to {args.target}: leave it out")
    load, save = Path(args.load), Path(args.save)
    check_absent(save)
    with postponed() as check, crafted(f"--load {load}"):
        source = known[args.source].source(load)
        check()
        for note in source.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
        left, total, told = {**source.sizes}, sum(source.sizes.values()), time.monotonic()

        def read(name: str) -> Any:
            nonlocal told
            check()
            left.pop(name, None)  # a TP rank reads what the one before it has read
            if time.monotonic() - told >= SECONDS_A_LINE:
                told = time.monotonic()
                done = total - sum(left.values())
                text = f"converted {done / 1e6:.1f} of {total / 1e6:.1f} MB"
                print(text, file=sys.stderr, flush=True)
            return source.read(name)

        target.write(replace(source, read=read), save, **options)
        check()
    print(f"{save}: converted from {load} ({args.source} -> {args.target})", flush=True)


def _add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--from", dest="source", required=True, choices=FORMAT_HELP, help="the format of --load")
    add("--to", dest="target", required=True, choices=FORMAT_HELP, help="the format to write")
    add("--load", required=True, metavar="SRC", help="what to read; it is not changed")
    add("--save", required=True, metavar="DST", help="the directory to write; it must not exist")
    for name in ("tensor", "pipeline"):
        add(
            f"--{name}-model-parallel-size",
            type=int,
            default=1,
            metavar="N",
            help="how many ranks the files are split over along this axis (default: 1)",
        )
    add(
        "--hf-family",
        metavar="NAME",
        help="with --to hf: the model_type to write, instead of the first one that expresses the "
        "model exactly",
    )


main = tool(
    "python -m megatron_lite.tools.convert",
    "Converts weights between formats.",
    _add_flags,
    convert,
    epilog="formats:\n" + "".join(f"  {name:16} {text}\n" for name, text in FORMAT_HELP.items()),
    formatter_class=argparse.RawDescriptionHelpFormatter,
)


if __name__ == "__main__":
    sys.exit(main())
