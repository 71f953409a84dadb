"""Plans a training run before it starts:
`python -m megatron_lite.tools.plan --model llama3-8b --gpus 8 --gpu h100-80gb`

It searches for the fastest plan that fits into memory, over tensor, pipeline, context and data
parallelism, virtual stages, micro-batch sizes, loss chunks and recompute policies. It prints the
plans, the terms of the peak, and the command that runs the best plan. docs/planning.md explains the
output. The exit status is 0 if a plan fits, and 1 if one fits only in a part of the reserve. It is
2 if none fits or if the input has a fault. The tool does not import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lite.config.checks import InputError, flag, input_faults
from megatron_lite.config.known_models import PRESETS, Preset, model_of, stored_values
from megatron_lite.config.megatron_flags import (
    add_flags_without_effect,
    check_only_values,
    renamed_words,
    take_ignored,
    translate_values,
)
from megatron_lite.config.other_ways import num_processes, without_launcher
from megatron_lite.config.plain import parse_whole_number, shown
from megatron_lite.config.recompute import AUTO
from megatron_lite.config.run_flags import Parser, add_run_flags, flag_of, paragraph
from megatron_lite.config.units import parse_bytes
from megatron_lite.data.durable_files import write_text
from megatron_lite.pages.plan_page import plan_page
from megatron_lite.parallel.messages import told_on_terminal
from megatron_lite.plan.auto_policy import Budget, default_reserve
from megatron_lite.plan.hardware import ALIASES, Hardware, load_hardware, machine_names
from megatron_lite.plan.problem import LOSS_CHUNK, SEARCHED, Problem, Values, problem_of
from megatron_lite.plan.verdict import (
    DOES_NOT_FIT,
    MOST_RANKS,
    FitVerdict,
    fewest_ranks,
    smallest_machine,
    status,
    verdict,
)
from megatron_lite.plan.verdict_text import Training, lines, plain_stages, plain_verdict
from megatron_lite.tools.command import check_ending, exit_status

PROGRAM = "python -m megatron_lite.tools.plan"
MOST_COUNTS = 16
MORE_DO_NOT_HELP = (
    "More GPUs alone do not help, as far as was tried. Shorten --seq-length, give more "
    "--memory-budget or --host-memory, or fix fewer settings."
)


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the command line. Returns the exit status."""
    parser, own = _parser(program)
    try:
        words, started = without_launcher(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        parser.error(f"a whole command line in one word: {error}")
    renamed, notes = renamed_words(words, parser._option_string_actions)
    flags = vars(parser.parse_args(renamed))
    given = {name: flags.pop(name) for name in own}
    if started:
        notes.append(f"left out, but for the number of GPUs: {shown(started)}")
        given["gpus"] = given["gpus"] or num_processes(started)
    found = []
    failed = exit_status(lambda: found.append(_plan(given, flags, notes)), program)
    return failed or found[0]


def _parser(program: str) -> tuple[Parser, list[str]]:
    """Returns the parser of the command line, and the names of the flags that are its own."""
    parser = Parser(
        prog=program,
        description=(
            "Finds the fastest plan of a training run that fits into memory. A flag of the run "
            "fixes that setting; `megatron-lite train --help` has the flags of a run."
        ),
        epilog="Exit status: 0 a plan fits, 1 only in a part of the reserve, 2 none fits or bad "
        "input.",
    )
    add = parser.add_argument
    add("--model", "--preset", metavar="NAME", help=", ".join(PRESETS))
    add("--hf-config", metavar="FILE", help="a config.json of Hugging Face")
    add("--config-json", metavar="FILE", help="a run as `train --dump-config` prints it")
    add("--gpus", metavar="N,..", help="numbers of GPUs (default: the fewest on which it trains)")
    add("--gpu", metavar="NAME", help=", ".join([*machine_names(), *sorted(ALIASES)]))
    add("--machine", metavar="FILE", help="a machine as megatron_lite.tools.calibrate writes it")
    add("--memory-budget", metavar="SIZE", help="such as 40GiB, instead of the card's memory")
    add("--reserve", metavar="SIZE", help="memory to leave free (default: 1 GiB and 3%% of it)")
    add(
        "--host-memory",
        metavar="SIZE",
        help="host memory of each GPU in which a policy may keep tensors, @host (default: 0), and "
        "the optimizer its states, if nothing else fits (default: any)",
    )
    add("--train-tokens", metavar="N", help="tokens to train on, such as 2e12: prints the days")
    add("--price-per-gpu-hour", metavar="PRICE", help="prints the cost, with --train-tokens")
    add("--json", metavar="FILE", help="write the plans as JSON; - is stdout, without the text")
    add("--html", metavar="FILE.html", help="write a page that shows the plans and their terms")
    own = [action.dest for action in parser.actions if action.dest != "help"]
    add_run_flags(parser, without=own, hidden=True)
    add_flags_without_effect(parser)
    return parser, own


def _plan(own: Mapping[str, Any], flags: dict[str, Any], notes: list[str]) -> int:
    """Prints the plans and returns the exit status.

    own, flags: the planner's flags and those of the run, by name.
    notes: those about the words of the command line.
    Raises InputError for a fault in the input.
    """
    if own["html"] is not None:
        check_ending("--html", own["html"], ".html", ".htm")
    check_only_values(flags)
    notes += take_ignored(flags)
    counts = None if own["gpus"] is None else _counts(own["gpus"])
    problem, budget = _problem(own, flags, notes, counts or ())
    tokens, price = (_number(own, name) for name in ("train_tokens", "price_per_gpu_hour"))
    if price is not None and tokens is None:
        raise InputError(f"--price-per-gpu-hour {price:g} needs --train-tokens: give it")
    training = Training(None if tokens is None else round(tokens), price)
    verdicts = list(_verdicts(problem, budget, counts))
    plain: dict[str, Any] = {
        "machine": problem.hardware.name,
        "verdicts": [plain_verdict(one, problem.hardware, training) for one in verdicts],
    }
    if own["json"] is not None:
        text = json.dumps(plain, indent=2) + "\n"
        sys.stdout.write(text) if own["json"] == "-" else write_text(own["json"], text)
    if own["html"] is not None:
        stages = [plain_stages(problem, one) for one in verdicts]
        write_text(own["html"], plan_page(plain, stages, notes))
    if own["json"] != "-":
        for note in notes:
            print(paragraph(f"note: {note}"))
        for shown_verdict in plain["verdicts"]:
            print("\n".join(["", *lines(shown_verdict)]))
        if counts is not None and all(one.word == DOES_NOT_FIT for one in verdicts):
            print(_more_gpus(problem, budget, max(one.num_ranks for one in verdicts)))
    return status(verdicts)


def _number(own: Mapping[str, Any], name: str) -> float | None:
    """Returns the number above 0 that a flag gives, or None."""
    text = own[name]
    try:
        number = None if text is None else float(text)
    except ValueError:
        number = 0.0
    if number is not None and not 0.0 < number < 1e24:
        raise InputError(
            f"{flag_of(name)} {shown(repr(text))}: give a number above 0, such as 2e12"
        )
    return number


def _verdicts(
    problem: Problem, budget: Budget, counts: Sequence[int] | None
) -> Iterator[FitVerdict]:
    if counts is None:
        with told_on_terminal("searching the fewest GPUs that are enough, of 1, 2, 4, ..."):
            yield smallest_machine(problem, budget)
        return
    for place, count in enumerate(counts, start=1):
        with told_on_terminal(
            f"searching the plans for {count} GPUs (number {place} of {len(counts)})"
        ):
            yield verdict(problem, count, budget)


def _counts(gpus: str) -> list[int]:
    """Returns the numbers of `--gpus`. Raises InputError if they are none."""
    try:
        counts = [parse_whole_number(one) for one in gpus.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > MOST_RANKS or len(counts) > MOST_COUNTS:
        raise InputError(
            f"--gpus {shown(repr(gpus))}: give up to {MOST_COUNTS} numbers from 1 to {MOST_RANKS}, "
            "such as 8 or 8,16,32"
        )
    return counts


def _more_gpus(problem: Problem, budget: Budget, tried: int) -> str:
    """Returns the lines about the fewest GPUs on which the run fits."""
    with told_on_terminal(f"searching the fewest GPUs that are enough, of more than {tried}"):
        count = fewest_ranks(problem, budget, above=tried)
    if count is None:
        return f"\n{paragraph(MORE_DO_NOT_HELP)}"
    return f"\nIt fits on {count} GPUs, the fewest of 2, 4, 8, ...: give --gpus {count}"


def _problem(
    own: Mapping[str, Any], flags: Mapping[str, Any], notes: list[str], counts: Sequence[int]
) -> tuple[Problem, Budget]:
    """Returns what to plan, and the memory of a rank. Adds the assumptions to the notes."""
    hardware = _hardware(own["gpu"], own["machine"])
    memory = _amount(own, "memory_budget", hardware.memory_bytes)
    values, found = _model_values(own)
    notes += found
    chosen = _chosen(flags, notes)
    limit = chosen.get("memory_limit") or values.get("training", {}).get("memory_limit")
    reserve = default_reserve(memory)
    if limit is not None and own["memory_budget"] is None:
        memory, reserve = _amount({"memory_limit": limit}, "memory_limit", 0, least=1), 0
        notes.append(
            f"--memory-limit {limit} is the memory that a plan may take, without a reserve"
        )
    reserve = _amount(own, "reserve", reserve)
    if reserve >= memory:
        raise InputError(
            f"a reserve of {reserve} bytes leaves nothing of the {memory} bytes of memory: give "
            "more --memory-budget or less --reserve, with a unit such as 40GiB"
        )
    host_bytes = None if own["host_memory"] is None else _amount(own, "host_memory", 0)
    problem = problem_of(
        values, chosen, hardware, host_bytes=host_bytes, notes=notes, num_ranks=counts
    )
    return problem, Budget(memory, reserve)


def _hardware(gpu: str | None, machine: str | None) -> Hardware:
    if (machine is None) == (gpu is None):
        raise InputError(
            f"give the machine once: --gpu NAME ({', '.join(machine_names())}) or --machine FILE"
        )
    if machine is not None:
        check_ending("--machine", machine, ".json")
    return load_hardware(machine or gpu or "")


def _amount(given: Mapping[str, Any], name: str, default: int, *, least: int = 0) -> int:
    """Returns the bytes that a flag gives, or the default."""
    if given[name] is None:
        return default
    with input_faults():
        return parse_bytes(flag_of(name), given[name], least=least)


def _chosen(flags: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the settings of the flags by field.

    Other values of Megatron are translated, with notes. The policy `auto` is what the tool
    searches, so it fixes nothing.
    """
    chosen = dict(flags)
    notes += translate_values(chosen, has_file=True)
    for name in SEARCHED & chosen.keys():
        least = 0 if name == LOSS_CHUNK else 1  # 0: no chunks
        if type(chosen[name]) is int and chosen[name] < least:
            raise InputError(f"{flag_of(name)} must be at least {least} (got {chosen[name]})")
    if chosen.get("recompute_policy") == AUTO:
        del chosen["recompute_policy"]
    return chosen


def _model_values(own: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Returns the values of the model or run, and the notes about them."""
    sources = ("model", "hf_config", "config_json")
    if sum(own[name] is not None for name in sources) > 1:
        raise InputError("--model, --hf-config and --config-json each describe the run: give one")
    if own["config_json"] is not None:
        return stored_values(own["config_json"]), []
    for name in sources[:2]:
        if own[name] is not None:
            values, model = model_of(flag(name), own[name])
            notes = () if isinstance(model, Preset) else model.notes
            return values, [f"{own[name]}: {note}" for note in notes]
    return {}, []


if __name__ == "__main__":
    sys.exit(main())
