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
from megatron_lite.config.run_flags import add_settings, taken
from megatron_lite.config.setting import Settings, count, required, setting, settings_of
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


class ConvertSettings(Settings):
    """What is converted. tp_size, pp_size: over how many ranks the files are split."""

    source: str = required("the format of --load", name="--from", choices=FORMAT_HELP)
    target: str = required("the format to write", name="--to", choices=FORMAT_HELP)
    load: str = required("what to read; it is not changed", metavar="SRC")
    save: str = required("the directory to write; it must not exist", metavar="DST")
    tp_size: int = count("ranks that split each layer", 1, name="--tensor-model-parallel-size")
    pp_size: int = count("ranks that split the layers", 1, name="--pipeline-model-parallel-size")
    family: str | None = setting(
        "with --to hf: the model_type to write, instead of the first one that expresses the model "
        "exactly",
        name="--hf-family",
        metavar="NAME",
    )


def convert(args: ConvertSettings) -> None:
    """Converts.

    Raises InputError for a fault in the flags, in the source or in the target. A signal ends it
    after the tensor that is being converted.
    """
    # Imported late: the module imports torch, which --help does not need.
    from megatron_lite.convert.target import check_absent

    known = formats()
    target = known[args.target]
    options = {}
    for name in ("tp_size", "pp_size", "family"):
        one, value = settings_of(ConvertSettings)[name], getattr(args, name)
        if name in inspect.signature(target.write).parameters:
            options[name] = value
        elif value != one.default:
            raise InputError(
                f"{one.with_value(value)} does not apply to --to {args.target}: leave it out"
            )
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


main = tool(
    "python -m megatron_lite.tools.convert",
    "Converts weights between formats.",
    lambda parser: add_settings(parser, ConvertSettings),
    lambda args: convert(taken(ConvertSettings, args)),
    epilog="formats:\n" + "".join(f"  {name:16} {text}\n" for name, text in FORMAT_HELP.items()),
    formatter_class=argparse.RawDescriptionHelpFormatter,
)


if __name__ == "__main__":
    sys.exit(main())
