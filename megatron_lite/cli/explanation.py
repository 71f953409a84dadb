"""The output of the flags that print instead of training.

They are `--dump-config`, `--explain-recompute` and `--dry-run-memory`. The module imports torch,
which takes seconds, for the last one only.

The subcommand `megatron-lite explain` is --explain-recompute of the program that trains.
"""

import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_lite.config.checks import input_faults
from megatron_lite.config.invocation import subcommand
from megatron_lite.config.known_models import PRESETS
from megatron_lite.config.notices import notices as notices_of
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import help_columns
from megatron_lite.data.tokenizers import resolve_vocabulary
from megatron_lite.memory.explain.recompute_report import explain, likely_device
from megatron_lite.memory.explain.report_text import report_text
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.signals import safe_output
from megatron_lite.plan.auto_policy import with_chosen_policy
from megatron_lite.plan.hardware import (
    CPU_MACHINE,
    load_hardware,
    machine_for_policy,
    machine_names,
)
from megatron_lite.plan.problem import USUAL_LENGTH
from megatron_lite.plan.step_time import StepTime, step_time

from . import pretrain
from .flags import ParsedArguments

USUAL_GPU = "h100-80gb"  # stands for a GPU that is not here


def print_instead(arguments: ParsedArguments, launch: Launch) -> None:
    """Prints what the command line asks for instead of training: the configuration as JSON on every
    rank, or else, on rank 0 only, an explanation or the report of a dry run.

    The notices are a part of these two. Beside JSON they go to stderr, on rank 0 only.

    A dry run needs only the fields that decide sizes. Raises InputError for a fault in the
    tokenizer's files, for a rank beyond the world, for a batch that the run would refuse, and for a
    setting that a dry run cannot follow.
    """
    config, notices, settings = arguments.config, arguments.notices, arguments.dry_run
    if arguments.prints == "dump_config":
        if launch.rank == 0 and notices:
            print(*notices, sep="\n", file=sys.stderr)
        print(config.to_json())
        return
    if launch.rank:
        return
    if arguments.prints == "explain_recompute":
        print(*explanation(config, notices, launch.world_size), sep="\n")
        return
    backend = config.parallel.distributed_backend
    device = settings.dry_run_device or likely_device(backend)
    with input_faults():
        world_size = settings.world_size(config.parallel, launched=launch.world_size)
        config, chosen = _complete(config, world_size, device)
        ranks = settings.ranks(config.stages(), world_size=world_size)
        config.batch_schedule(config.parallel.data_parallel_size(world_size))
    if settings.dry_run_device is None and device == "cpu" and backend == "auto":
        chosen += ["no GPU is here: add --dry-run-device cuda if the run will have GPUs"]
    # Imported late: these modules import torch.
    from megatron_lite.training.dry_run import dry_run, dry_run_text

    told = partial(print, file=sys.stderr, flush=True)
    measured = [
        dry_run(config, rank, world_size=world_size, device=device, told=told) for rank in ranks
    ]
    print(*notices, *chosen, dry_run_text(config, measured, device=device), sep="\n")


def explanation(config: RunConfig, notices: Sequence[str], world_size: int = 1) -> list[str]:
    """Returns the lines that `--explain-recompute` prints.

    The configuration needs only the fields that decide sizes, not those that training needs.

    world_size: the number of ranks that the launcher started. 1: the explanation is for one
        data-parallel rank, since no launcher started more.

    Raises InputError for a fault in the tokenizer's files, and for a batch or a number of ranks
    that the run would refuse.
    """
    machine, backend = config.logging.machine, config.parallel.distributed_backend
    device = likely_device(backend)
    if machine is not None and backend != "gloo":
        device = load_hardware(machine).device
    config, chosen = _complete(config, world_size, device)
    told_in_report = notices_of(config, "recompute")
    num_ranks = world_size if world_size > 1 else config.parallel.model_ranks
    with input_faults():
        hardware = load_hardware(machine or (USUAL_GPU if device == "cuda" else CPU_MACHINE))
        dp_size, own = config.parallel.data_parallel_size(num_ranks), config.training
        report, times = explain(config, device, dp_size=dp_size), list[StepTime]()
        # Without a batch, one of as many micro-batches as the report has.
        samples = dp_size * own.micro_batch_size
        batch_size = own.global_batch_size or samples * report.num_microbatches
        for one in report.policies:
            run = one.config.with_fields({"global_batch_size": batch_size})
            times.append(step_time(run, hardware, num_ranks))
    told = f"{hardware.name}, +-{max(one.band for one in times):.0%}"
    end = (
        f"{' '.join(subcommand('plan'))} --config-json RUN.json --gpus {num_ranks} --gpu "
        "NAME finds the fastest layout, micro-batch and policy of this run that fit into memory; "
        "--dump-config prints RUN.json."
    )
    if machine is None and device == "cpu" and backend != "gloo":
        end += " No GPU is here, so the figures above are a CPU's: --machine NAME gives a GPU's."
    return [
        *(notice for notice in [*notices, *chosen] if notice not in told_in_report),
        report_text(report, help_columns(), [one.seconds for one in times], told),
        "",
        *textwrap.wrap(end, help_columns(), break_on_hyphens=False),
    ]


def _complete(config: RunConfig, world_size: int, device: str) -> tuple[RunConfig, list[str]]:
    """Returns the run with the size of its vocabulary and the policy that `auto` chooses, and a
    line about the policy.

    With `--vocab-size` the files of the tokenizer may be missing: nothing else would be read.
    """
    if config.tokenizer.vocab_size is None:
        config = replace(config, tokenizer=resolve_vocabulary(config.tokenizer))
    if not config.recompute.is_to_be_chosen:
        return config, []
    machine = machine_for_policy(config.logging.machine, device=device, gpu_name=None)
    num_ranks = max(world_size, config.parallel.model_ranks)
    config, notice = with_chosen_policy(
        config, machine, num_ranks, device_bytes=machine.memory_bytes
    )
    return config, [notice]


HELP = """usage: {program} FLAGS

Prints, layer by layer, what a run keeps for backward, rebuilds and sends, the
memory of each rank, and what other recompute flags would do. It trains nothing
and needs no GPU.

FLAGS are those of the run, of which only sizes and layout are needed:
  {program} --model llama3-8b --recompute-policy 'every-2:full'
  {program} --hf-config config.json --seq-length 8192 --micro-batch-size 1

--model NAME, or --preset NAME, is one of
{names}.
It assumes --bf16, --micro-batch-size 1 and a --seq-length, and says so.
--gpu NAME, or --machine FILE, is the machine of the run, one of
{machines}.

`{train} --help` has the topics of all flags, and
`--help recompute` those of recomputation.
"""


def main(argv: Sequence[str], program: str = "megatron-lite explain") -> int:
    """Prints the explanation and returns the exit status."""
    if not argv or argv[-1] in ("-h", "--help"):
        text = HELP.format(
            program=program,
            names=textwrap.fill(", ".join(PRESETS), 80),
            train=" ".join(subcommand("train")),
            machines=", ".join(machine_names()),
        )
        with safe_output():
            print(text, end="")
        return 0 if argv else 2
    assumed = assumed_words(argv)
    if assumed:
        with safe_output():
            print(f"assumed for this model: {' '.join(assumed)}")
    # The planner's --gpu takes the names that --machine takes here.
    renamed = [re.sub("^--gpu(?==|$)", "--machine", word) for word in argv]
    return pretrain.main([*renamed, *assumed, "--explain-recompute"], program)


def assumed_words(argv: Sequence[str]) -> list[str]:
    """Returns the flags that a command line with a known `--model` lacks, with usual values."""
    words = [part for word in argv for part in word.split("=", 1)]
    given = {word.replace("_", "-") for word in words}
    names = [
        name
        for flag, name in itertools.pairwise(words)
        if flag in ("--model", "--preset") and name in PRESETS
    ]
    if not names:
        return []
    positions = PRESETS[names[0]].fields["max_position_embeddings"]
    usual = {
        ("--seq-length",): ["--seq-length", str(min(positions, USUAL_LENGTH))],
        ("--micro-batch-size",): ["--micro-batch-size", "1"],
        ("--bf16", "--fp16", "--no-bf16"): ["--bf16"],
    }
    return [word for flags, words in usual.items() if not given & {*flags} for word in words]
