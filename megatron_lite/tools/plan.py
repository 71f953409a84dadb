"""Plans a training run before it starts:
`python -m megatron_lite.tools.plan --model llama3-8b --gpus 8 --gpu h100-80gb`

It searches for the fastest plan that fits into memory, over tensor, pipeline, context and data
parallelism, virtual stages, micro-batch sizes, loss chunks and recompute policies. It prints the
plans, the terms of the peak, and the command that runs the best plan. docs/planning.md explains the
output. The exit status is 0 if a plan fits, and 1 if one fits only in a part of the reserve. It is
2 if none fits or if the input has a fault. The tool does not import torch.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_lite.config.checks import (
    InputError,
    Values,
    input_faults,
    parse_whole_number,
    quoted,
    shown,
)
from megatron_lite.config.known_models import PRESETS, model_of, stored_values
from megatron_lite.config.megatron_flags import (
    add_flags_without_effect,
    renamed_words,
    take_ignored,
    translate_values,
)
from megatron_lite.config.other_ways import num_processes, without_launcher
from megatron_lite.config.recompute import AUTO
from megatron_lite.config.run_flags import (
    Parser,
    add_run_flags,
    add_settings,
    flag_of,
    paragraph,
    run_fields,
    taken,
)
from megatron_lite.config.setting import Settings, setting, settings_of
from megatron_lite.config.units import GIB, parse_bytes
from megatron_lite.data.durable_files import check_writable, write_text
from megatron_lite.pages.document import document, picture, printable
from megatron_lite.parallel.messages import told_on_terminal
from megatron_lite.plan.auto_policy import Budget, default_reserve
from megatron_lite.plan.hardware import ALIASES, load_hardware, machine_names
from megatron_lite.plan.problem import LOSS_CHUNK, SEARCHED, Problem, problem_of
from megatron_lite.plan.verdict import (
    DOES_NOT_FIT,
    EXIT_STATUS,
    MOST_RANKS,
    FitVerdict,
    fewest_ranks,
    smallest_machine,
    verdict,
)
from megatron_lite.plan.verdict_text import Training, lines, plain_stages, plain_verdict

from .command import check_ending, exit_status

PROGRAM = "python -m megatron_lite.tools.plan"
MOST_COUNTS = 16
MORE_DO_NOT_HELP = (
    "More GPUs alone do not help, as far as was tried. Shorten --seq-length, give more "
    "--memory-budget or --host-memory, or fix fewer settings."
)


ONE_RUN = "each describes the run"


def _counts(text: str) -> tuple[int, ...]:
    """Returns the numbers of `--gpus`. Raises ValueError if they are none."""
    try:
        counts = tuple(parse_whole_number(one) for one in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1 or max(counts) > MOST_RANKS or len(counts) > MOST_COUNTS:
        raise ValueError(
            f"--gpus {quoted(text)}: give up to {MOST_COUNTS} numbers from 1 to {MOST_RANKS}, "
            "such as 8 or 8,16,32"
        )
    return counts


def _amount(flag: str, help: str) -> Any:
    return setting(help, parse=partial(parse_bytes, flag))


class PlanSettings(Settings):
    """The planner's own flags."""

    model: str | None = setting(
        ", ".join(PRESETS), alias="--preset", excludes="hf_config config_json", why=ONE_RUN
    )
    hf_config: str | None = setting(
        "a config.json of Hugging Face", excludes="config_json", why=ONE_RUN
    )
    config_json: str | None = setting("a run as `train --dump-config` prints it")
    gpus: tuple[int, ...] = setting(
        "numbers of GPUs, N,.. (default: the fewest on which it trains)", (), parse=_counts
    )
    gpu: str | None = setting(", ".join([*machine_names(), *sorted(ALIASES)]))
    machine: str | None = setting("a machine as megatron_lite.tools.calibrate writes it")
    memory_budget: int | None = _amount(
        "--memory-budget", "such as 40GiB, instead of the card's memory"
    )
    reserve: int | None = _amount("--reserve", "memory to leave free (default: 1 GiB and 3% of it)")
    host_memory: int | None = _amount(
        "--host-memory",
        "host memory of each GPU in which a policy may keep tensors, @host (default: 0), and "
        "the optimizer its states, if nothing else fits (default: any)",
    )
    train_tokens: float | None = setting(
        "tokens to train on, such as 2e12: prints the days", least=1, below=1e24
    )
    price_per_gpu_hour: float | None = setting(
        "prints the cost", above=0, below=1e24, needs="train_tokens"
    )
    json: str | None = setting("write the plans as JSON; - is stdout, without the text")
    html: str | None = setting("write a page, FILE.html, that shows the plans and their terms")

    def check_rules(self) -> None:
        if self.html:
            check_ending("--html", self.html, ".html", ".htm")
            if self.json == self.html:
                raise ValueError(f"--json and --html name one file, {self.json}: give two names")
        if (self.machine is None) == (self.gpu is None):
            raise ValueError(
                f"give the machine once: --gpu NAME ({', '.join(machine_names())}) or "
                "--machine FILE"
            )
        if self.machine:
            check_ending("--machine", self.machine, ".json")


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the command line. Returns the exit status."""
    parser = Parser(
        prog=program,
        description=(
            "Finds the fastest plan of a training run that fits into memory. A flag of the run "
            "fixes that setting; `megatron-lite train --help` has the flags of a run."
        ),
        epilog="Exit status: 0 a plan fits, 1 only in a part of the reserve, 2 none fits or bad "
        "input.",
    )
    add_settings(parser, PlanSettings)
    add_run_flags(parser, without=settings_of(PlanSettings), hidden=True)
    add_flags_without_effect(parser)
    try:
        words, started = without_launcher(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        parser.error(f"a whole command line in one word: {error}")
    renamed, notes = renamed_words(words, parser._option_string_actions)
    args = parser.parse_args(renamed)
    if started:
        notes.append(f"left out, but for the number of GPUs: {shown(started)}")
        if "gpus" not in args and (number := num_processes(started)):
            args.gpus = _counts(number)
    return exit_status(lambda: _plan(args, notes), program)


def _plan(args: Namespace, notes: list[str]) -> int:
    """Prints the plans and returns the exit status.

    notes: those about the words of the command line.
    Raises InputError for a fault in the input.
    """
    own, names = taken(PlanSettings, args), settings_of(PlanSettings)
    flags = {name: value for name, value in vars(args).items() if name not in names}
    notes += take_ignored(flags)
    problem, budget = _problem(own, flags, notes)
    for path in (own.json, own.html):
        if path and path != "-":
            check_writable(path)
    tokens = round(own.train_tokens) if own.train_tokens else None
    training = Training(tokens, own.price_per_gpu_hour)
    verdicts: list[FitVerdict] = []
    if not own.gpus:
        with told_on_terminal("searching the fewest GPUs that are enough, of 1, 2, 4, ..."):
            verdicts.append(smallest_machine(problem, budget))
    for place, count in enumerate(own.gpus, start=1):
        with told_on_terminal(
            f"searching the plans for {count} GPUs (number {place} of {len(own.gpus)})"
        ):
            verdicts.append(verdict(problem, count, budget))
    plain: Values = {
        "machine": problem.hardware.name,
        "verdicts": [plain_verdict(one, problem.hardware, training) for one in verdicts],
    }
    if own.json:
        text = json.dumps(plain, indent=2) + "\n"
        sys.stdout.write(text) if own.json == "-" else write_text(own.json, text)
    if own.html:
        stages = [plain_stages(one) for one in verdicts]
        write_text(own.html, plan_page(plain, stages, notes))
    if own.json != "-":
        for note in notes:
            print(paragraph(f"note: {note}"))
        for shown_verdict in plain["verdicts"]:
            print("\n".join(["", *lines(shown_verdict)]))
        if own.gpus and all(one.word == DOES_NOT_FIT for one in verdicts):
            tried = max(own.gpus)
            with told_on_terminal(
                f"searching the fewest GPUs that are enough, of more than {tried}"
            ):
                found = fewest_ranks(problem, budget, above=tried)
            enough = found and found.num_ranks
            more = f"It fits on {enough} GPUs, the fewest of 2, 4, 8, ...: give --gpus {enough}"
            print("", paragraph(more if found else MORE_DO_NOT_HELP), sep="\n")
    return min(EXIT_STATUS[one.word] for one in verdicts)


def _problem(own: PlanSettings, flags: Values, notes: list[str]) -> tuple[Problem, Budget]:
    """Returns what to plan, and the memory of a rank. Adds the assumptions to the notes."""
    hardware = load_hardware(own.machine or own.gpu or "")
    memory = hardware.memory_bytes if own.memory_budget is None else own.memory_budget
    values = stored_values(own.config_json) if own.config_json else {}
    for name, source in (("--model", own.model), ("--hf-config", own.hf_config)):
        if source:
            values, model = model_of(name, source)
            notes += [f"{source}: {note}" for note in model.notes]
    notes += translate_values(flags, run_fields(), has_file=True)
    for name in SEARCHED & flags.keys():
        least = 0 if name == LOSS_CHUNK else 1  # 0: no chunks
        if type(flags[name]) is int and flags[name] < least:
            raise InputError(f"{flag_of(name)} must be at least {least} (got {flags[name]})")
    if flags.get("recompute_policy") == AUTO:  # which is what the tool searches
        del flags["recompute_policy"]
    limit = flags.get("memory_limit") or values.get("memory_limit")
    reserve = default_reserve(memory)
    if limit is not None and own.memory_budget is None:
        with input_faults():
            memory, reserve = parse_bytes("--memory-limit", limit, least=1), 0
        notes.append(
            f"--memory-limit {limit} is the memory that a plan may take, without a reserve"
        )
    reserve = reserve if own.reserve is None else own.reserve
    if reserve >= memory:
        raise InputError(
            f"a reserve of {reserve} bytes leaves nothing of the {memory} bytes of memory: give "
            "more --memory-budget or less --reserve, with a unit such as 40GiB"
        )
    problem = problem_of(
        values, flags, hardware, host_bytes=own.host_memory, notes=notes, num_ranks=own.gpus
    )
    return problem, Budget(memory, reserve)


Stages = Sequence[Values]  # by pipeline rank: {"rank", "terms"}


def plan_page(found: Values, stages: Sequence[Stages], notes: Sequence[str]) -> str:
    """Returns the planning page as an HTML document.

    found: what `plan --json` writes. stages: of each verdict, the terms of the ranks of its plan.
    """
    pictures = [
        picture(figure, one, own) for one, own in zip(found["verdicts"], stages, strict=True)
    ]
    title = f"Plan for {found['machine']}"
    return document(
        "plan.html", title, notes, verdicts=found["verdicts"], stages=stages, pictures=pictures
    )


def figure(one: Values, stages: Stages) -> Any:
    """Returns the matplotlib figure: plans by time and memory, and a stacked bar for each rank.

    The lines are the memory, and the memory without the reserve.
    """
    from matplotlib.figure import Figure

    whole = Figure(figsize=(11, max(4.0, 1.5 + 0.2 * len(stages))), layout="constrained")
    plans, bars = whole.subplots(1, 2)
    for label, marker, found in (
        ("one step away", "x", one["neighbours"]),
        ("plans", "o", one["plans"]),
        ("best plan", "*", one["plans"][:1] or [one["smallest"]]),
    ):
        seconds = [each["step_seconds"] for each in found]
        gib = [each["peak_bytes"] / GIB for each in found]
        plans.plot(seconds, gib, linestyle="", marker=marker, label=label)
    plans.set_xlabel("seconds of a step, estimated")
    plans.set_ylabel("peak of the fullest rank [GiB]")
    plans.legend(frameon=False)
    ranks = [str(stage["rank"]) for stage in stages]
    ends = [0.0] * len(stages)
    for name in dict.fromkeys(term["name"] for stage in stages for term in stage["terms"]):
        widths = [
            sum(term["bytes"] for term in stage["terms"] if term["name"] == name) / GIB
            for stage in stages
        ]
        bars.barh(ranks, widths, left=ends, label=printable(name))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    bars.set_xlabel("peak [GiB]")
    bars.set_ylabel("pipeline rank")
    bars.invert_yaxis()
    whole.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    for bound, style in (
        (one["memory_bytes"], "-"),
        (one["memory_bytes"] - one["reserve_bytes"], ":"),
    ):
        line = dict(color="black", linewidth=1, linestyle=style)
        plans.axhline(bound / GIB, **line)
        bars.axvline(bound / GIB, **line)
    return whole


if __name__ == "__main__":
    sys.exit(main())
