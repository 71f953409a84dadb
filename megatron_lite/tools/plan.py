"""Plans a training run before it starts:
`python -m megatron_lite.tools.plan --model llama3-8b --gpus 8 --gpu h100-80gb`

It searches for the fastest plan that fits into memory, over tensor, pipeline, context and data
parallelism, virtual stages, micro-batch sizes, loss chunks and recompute policies. It prints the
plans, the terms of the peak, and the command that runs the best plan. docs/planning.md explains the
output. The exit status is 0 if a plan fits, and 1 if one fits only in a part of the reserve. It is
2 if none fits or if the input has a fault. The tool does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import read_hf_file
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.known_models import PRESETS, preset
from megatron_lite.config.megatron_flags import only_value_faults, renamed_words, take_ignored
from megatron_lite.config.megatron_values import translate_values
from megatron_lite.config.parser import Faults, help_columns, paragraph
from megatron_lite.config.plain import LARGEST_TEXT, parse_whole_number, shown
from megatron_lite.config.recompute import AUTO, RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import build_run, fixed_value, flag_of, run_fields
from megatron_lite.config.units import parse_bytes
from megatron_lite.data.durable_files import replacing
from megatron_lite.memory.predict.parameter_counts import parameter_count
from megatron_lite.pages.plan_page import plan_page
from megatron_lite.parallel.messages import told_on_terminal
from megatron_lite.plan.auto_policy import Budget, default_reserve
from megatron_lite.plan.details import MOST_LAYOUTS, details
from megatron_lite.plan.fit_verdict import MOST_RANKS, FitVerdict, smallest_machine, status, verdict
from megatron_lite.plan.hardware import load_hardware, machine_names
from megatron_lite.plan.layouts import DATA_PARALLEL, KEPT_RECOMPUTE, LOSS_CHUNK, SEARCHED, Problem
from megatron_lite.plan.plan_text import lines, to_json
from megatron_lite.plan.search import Search
from megatron_lite.tools.command import exit_status
from megatron_lite.tools.more_gpus import more_gpus
from megatron_lite.tools.plan_flags import OWN, plan_parser

PROGRAM = "python -m megatron_lite.tools.plan"

MOST_COUNTS = 16
USUAL_TOKENS = 2**22  # of a step, if --global-batch-size is not given
USUAL_LENGTH = 8192  # the longest --seq-length that is assumed


class _Input(NamedTuple):
    """The request of the command line. notes: the assumptions, in words."""

    problem: Problem
    budget: Budget
    notes: tuple[str, ...]


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the command line. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = plan_parser(program)
    renamed, notes = renamed_words(words, parser._option_string_actions)
    args = vars(parser.parse_args(renamed))
    found: list[int] = []
    failed = exit_status(lambda: found.append(_plan(args, [program, *words], notes)), program)
    return failed or found[0]


def _plan(args: dict[str, Any], typed: Sequence[str], notes: Sequence[str]) -> int:
    """Prints the plans and returns the exit status.

    typed: the command line, which begins with the name of the program.
    notes: those about the words of the command line.

    Raises InputError for a fault in the input.
    """
    own = {name: args.pop(name) for name in OWN}
    if own["html"] is not None and not own["html"].endswith((".html", ".htm")):
        raise InputError(f"--html {shown(own['html'])}: give a file that ends in .html")
    if faults := only_value_faults(args):
        raise InputError("; ".join(faults))
    notes = [*notes, *take_ignored(args)]
    given = _input(own, args, notes)
    problem, budget = given.problem, given.budget
    verdicts = list(_verdicts(problem, budget, own["gpus"]))
    if own["json"] is not None:
        _write(own["json"], to_json(verdicts, problem.hardware) + "\n")
    if own["html"] is not None:
        _write(own["html"], _page(given, verdicts))
    if own["json"] != "-":
        for note in given.notes:
            print(paragraph(f"note: {note}"))
        for one in verdicts:
            print("\n".join(["", *lines(one, problem.hardware, help_columns())]))
        if own["gpus"] is not None:
            for line in more_gpus(problem, budget, verdicts, typed):
                print(line)
    return status(verdicts)


def _page(given: _Input, verdicts: Sequence[FitVerdict]) -> str:
    """Returns the planning page. The grids of several verdicts share the size of one."""
    problem, most = given.problem, max(MOST_LAYOUTS // len(verdicts), 8)
    shown = json.loads(to_json(verdicts, problem.hardware))
    for one, plain in zip(verdicts, shown["verdicts"], strict=True):
        plain["details"] = details(Search(problem), one, most_layouts=most)
    return plan_page({**shown, "notes": given.notes})


def _verdicts(problem: Problem, budget: Budget, gpus: str | None) -> Iterator[FitVerdict]:
    if gpus is not None:
        counts = _counts(gpus)
        for place, count in enumerate(counts, start=1):
            with told_on_terminal(
                f"searching the plans for {count} GPUs (number {place} of {len(counts)})"
            ):
                yield verdict(problem, count, budget)
        return
    base = problem.base
    parameters = parameter_count(base.model, base.tokenizer.true_vocab_size)
    with told_on_terminal("searching the fewest GPUs that are enough, of 1, 2, 4, ..."):
        yield smallest_machine(problem, budget, parameters)


def _counts(text: str) -> list[int]:
    try:
        counts = [parse_whole_number(one) for one in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > MOST_RANKS or len(counts) > MOST_COUNTS:
        raise InputError(
            f"--gpus {shown(repr(text))}: give up to {MOST_COUNTS} numbers from 1 to {MOST_RANKS}, "
            "such as 8 or 8,16,32"
        )
    return counts


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    with replacing(path) as beside, open(beside, "w", encoding="utf-8") as file:
        file.write(text)


def _input(own: Mapping[str, Any], flags: Mapping[str, Any], told: Sequence[str]) -> _Input:
    machine = own["machine"] or own["gpu"]
    if (own["machine"] is None) == (own["gpu"] is None):
        raise InputError(
            f"give the machine once: --gpu NAME ({', '.join(machine_names())}) or --machine FILE"
        )
    if own["machine"] is not None and not machine.endswith(".json"):
        raise InputError(f"--machine {shown(repr(machine))}: give a file that ends in .json")
    hardware = load_hardware(machine)
    memory = hardware.memory_bytes
    if own["memory_budget"] is not None:
        memory = _bytes_of(own, "memory_budget")
    values, found = _model_values(own)
    notes = [*told, *found]
    chosen = _chosen(own, flags, notes)
    limit = chosen.get("memory_limit") or values.get("training", {}).get("memory_limit")
    reserve = default_reserve(memory)
    if limit is not None and own["memory_budget"] is None:
        memory, reserve = _amount("--memory-limit", limit, least=1), 0
        notes.append(
            f"--memory-limit {limit} is the memory that a plan may take, without a reserve"
        )
    if own["reserve"] is not None:
        reserve = _bytes_of(own, "reserve")
    if reserve >= memory:
        raise InputError(
            f"a reserve of {reserve} bytes leaves nothing of the {memory} bytes of memory: give "
            "more --memory-budget or less --reserve, with a unit such as 40GiB"
        )
    host_bytes = _bytes_of(own, "host_memory")
    problem = problem_of(values, chosen, notes)
    return _Input(
        problem._replace(hardware=hardware, host_bytes=host_bytes),
        Budget(memory, reserve),
        tuple(notes),
    )


def _chosen(own: Mapping[str, Any], flags: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the settings of the flags and of --fix by field.

    Other values of Megatron are translated, with notes. The policy `auto` is what the tool
    searches, so it fixes nothing.
    """
    chosen, faults = dict(flags), Faults()
    notes += translate_values(chosen, faults, has_file=True)
    if faults.texts:
        raise InputError("; ".join(faults.texts))
    for text in own["fix"]:
        name, value = fixed_value(text)
        if name in chosen and chosen[name] != value:
            raise InputError(f"--fix {shown(text)} contradicts the flag of the same name")
        chosen[name] = value
    for name in SEARCHED & chosen.keys():
        least = 0 if name == LOSS_CHUNK else 1  # 0: no chunks
        if type(chosen[name]) is int and chosen[name] < least:
            raise InputError(f"{flag_of(name)} must be at least {least} (got {chosen[name]})")
    if chosen.get("recompute_policy") == AUTO:
        del chosen["recompute_policy"]
    return chosen


def _bytes_of(own: Mapping[str, Any], name: str) -> int:
    return _amount(flag_of(name), own[name])


def _amount(name: str, text: str, *, least: int = 0) -> int:
    try:
        return parse_bytes(name, text, least=least)
    except ValueError as error:
        raise InputError(str(error)) from None


def _model_values(own: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns the values of the model by topic and field, and the notes about them."""
    sources = {name: own[name] for name in ("model", "hf_config", "config_json")}
    if sum(value is not None for value in sources.values()) > 1:
        raise InputError("--model, --hf-config and --config-json each describe the run: give one")
    if own["config_json"] is not None:
        return _from_run(own["config_json"]), []
    if own["hf_config"] is not None:
        model = read_hf_file(Path(own["hf_config"]))
        notes = [f"{own['hf_config']}: {note}" for note in model.notes]
        return _values(model.fields, model.vocab_size), notes
    if own["model"] is not None:
        known = preset(own["model"])
        return _values(known.fields, known.vocab_size), []
    return {}, []


def _values(fields: Mapping[str, Any], vocab_size: int) -> dict[str, dict[str, Any]]:
    # NullTokenizer adds one id to --vocab-size.
    return {"model": dict(fields), "tokenizer": {"vocab_size": vocab_size - 1}}


def _from_run(path: str) -> dict[str, dict[str, Any]]:
    text = _text(path)
    try:
        return dataclasses.asdict(RunConfig.from_json(text))
    except ValueError as error:
        raise InputError(f"--config-json {path}: {error}") from None


def _text(path: str) -> str:
    return read_input_text(path, LARGEST_TEXT)


def problem_of(
    values: dict[str, dict[str, Any]], chosen: Mapping[str, Any], notes: list[str]
) -> Problem:
    """Returns the problem, still without a machine.

    values: those of the model or of a whole run. chosen: those of flags and --fix, which override
    them. Adds the assumptions to `notes`.
    """
    topics = {name: field.topic for name, field in run_fields().items()}
    policy = {
        name: value
        for name, value in chosen.items()
        if topics[name] == "recompute" and name not in KEPT_RECOMPUTE
    }
    fixed = {name: value for name, value in chosen.items() if name in SEARCHED | DATA_PARALLEL}
    for name, value in chosen.items():
        if name not in SEARCHED and name not in policy:
            values.setdefault(topics[name], {})[name] = value
    _drop_searched(values, topics)
    _complete(values, chosen, notes)
    base = build_run(values)
    if base.tokenizer.vocab_size is None:
        raise InputError(
            f"missing --vocab-size: give the number of ids of the {base.tokenizer.tokenizer_type}, "
            "since a plan reads no file of a tokenizer"
        )
    recompute = None
    if policy or base.training.torch_compile:
        kept = {name: getattr(base.recompute, name) for name in KEPT_RECOMPUTE}
        try:
            recompute = RecomputeConfig(**{**kept, **policy})
        except ValueError as error:
            raise InputError(str(error)) from None
    return Problem(base, load_hardware(machine_names()[0]), fixed, recompute)


def _drop_searched(values: dict[str, dict[str, Any]], topics: Mapping[str, str]) -> None:
    """Removes the dimensions of a layout and the policy from the values of a whole run."""
    for name, topic in topics.items():
        if name in SEARCHED or (topic == "recompute" and name not in KEPT_RECOMPUTE):
            values.get(topic, {}).pop(name, None)


def _complete(
    values: dict[str, dict[str, Any]], chosen: Mapping[str, Any], notes: list[str]
) -> None:
    """Adds the values that a plan needs and that were not given, with a note for each."""
    model, training = values.setdefault("model", {}), values.setdefault("training", {})
    data = values.setdefault("data", {})
    training.setdefault("micro_batch_size", 1)
    if not training.get("fp16") and "bf16" not in chosen and "bf16" not in training:
        training["bf16"] = True
        notes.append("--bf16 is assumed (--fix bf16=false plans in float32)")
    positions = model.get("max_position_embeddings")
    if "seq_length" not in data and positions is not None:
        data["seq_length"] = min(positions, USUAL_LENGTH)
        notes.append(f"--seq-length {data['seq_length']} is assumed")
    length = data.get("seq_length")
    if length is None:
        raise InputError("missing --seq-length: give it, or a model with --model or --hf-config")
    if length < 1:
        raise InputError(f"--seq-length must be at least 1 (got {length})")
    if positions is None or (
        length > positions
        and model.get("position_embedding_type") == "rope"
        and "max_position_embeddings" not in chosen
    ):
        model["max_position_embeddings"] = length
        notes.append(f"--max-position-embeddings {length} is assumed, as --seq-length")
    if training.get("global_batch_size") is None:
        training["global_batch_size"] = max(1, USUAL_TOKENS // length)
        notes.append(
            f"--global-batch-size {training['global_batch_size']} is assumed, about 4 million "
            "tokens a step"
        )
    missing = [
        flag_of(name)
        for name in ("num_layers", "hidden_size", "num_attention_heads")
        if name not in model
    ]
    if missing:
        raise InputError(
            f"missing {', '.join(missing)}: give a model with --model ({', '.join(PRESETS)}), "
            "--hf-config FILE or --config-json FILE, or give its flags"
        )


if __name__ == "__main__":
    sys.exit(main())
