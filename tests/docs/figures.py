"""The texts, figures and pictures of the pages that are made of results and of the package itself.

TEXTS has the functions of the marks `made by: NAME`, FIGURES those of `<!--=NAME-->`, and FILES
those that make a whole file. All are quick: they run no command.
"""

import argparse
import textwrap
from functools import lru_cache, partial

from arguments import build_parser
from benchmarks import published
from megatron_lite.api import run_config
from megatron_lite.config import policy
from megatron_lite.config.regions import REGIONS
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import PolicyFlops
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.recompute.schedule import plan_model
from tests.docs import outputs, torch_versions
from tests.docs.layer_drawing import layer_figure
from tests.docs.marks import ROOT, text_of

GIB = 2**30


# who-is-right.md


@lru_cache
def outcomes():
    """Returns {engine: {outcome: rows}} of the first table of docs/who-is-right.md."""
    lines = text_of("who-is-right").split("Rows by outcome:\n\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {
        cells[0]: dict(zip(rows[0][1:], map(int, cells[1:]), strict=True)) for cells in rows[2:]
    }


def right(engine):
    """Returns how many rows of who-is-right.md an engine trains exactly, or up to rounding."""
    found = outcomes()[engine]
    return str(found["equal to the bit"] + found["equal up to rounding"])


def wrong(engine):
    """Returns how many rows an engine trains in another way, without an error."""
    return str(outcomes()[engine]["silently other"])


def situations():
    """Returns the number of rows."""
    return str(sum(outcomes()["ours, `full`"].values()))


# What a policy keeps and costs


def run_of(name, **settings):
    """Returns a run of a preset in bfloat16 without dropout in attention."""
    return run_config(preset=name, attention_dropout=0.0, bf16=True, **settings)


# Llama 3 8B on 8 GPUs, as examples/large/llama3_8b.sh has it
ladder_run = partial(
    run_of,
    "llama3-8b",
    hidden_dropout=0.0,
    micro_batch_size=1,
    global_batch_size=512,
    seq_length=8192,
    make_vocab_size_divisible_by=32,
    tensor_model_parallel_size=4,
    sequence_parallel=True,
)
# Qwen3-30B-A3B with its experts over 8 ranks
expert_run = partial(
    run_of,
    "qwen3-30b-a3b",
    hidden_dropout=0.0,
    micro_batch_size=1,
    global_batch_size=512,
    seq_length=4096,
    use_distributed_optimizer=True,
    expert_model_parallel_size=8,
    moe_token_dispatcher_type="alltoall",
)
# the 22B model of 2205.05198 on 8 GPUs, whose layer has every region
drawn_run = partial(
    run_of,
    "22b",
    micro_batch_size=4,
    global_batch_size=4,
    seq_length=2048,
    vocab_size=51199,
    tensor_model_parallel_size=8,
    sequence_parallel=True,
    recompute_policy="*:none",
)


EXPERT_LADDER = ("*:none", "*:moe_act", "*:layernorm+moe_act", "*:moe", "*:full")
LADDER = (
    "*:none",
    "*:layernorm",
    "*:pointwise",
    "*:mlp",
    "*:mlp+layernorm",
    "*:ops(matmul,attention)",
    "every-2:full; *:pointwise",
    "*:full",
    "*:full/2",
    "*:full@host",
    "*:none@host",
)


def ladder(run=ladder_run, policies=LADDER, *, ranks=2):
    """Returns the table of some policies, from most kept bytes to fewest."""
    lines = [
        "| `--recompute-policy` | kept on the GPU, GiB | in host memory, GiB | whole peak, GiB "
        "| FLOPs |",
        "|---|---|---|---|---|",
    ]
    for text in policies:
        config = run(recompute_policy=text)
        plan, sizes = plan_model(config), Sizes.of(config, device="cuda")
        peak = fullest_step_peak(config, device="cuda", dp_size=ranks)
        lines.append(
            f"| `{text}` | {activation_bytes(plan, sizes) / GIB:.2f} "
            f"| {activation_bytes(plan, sizes, on_host=True) / GIB:.2f} "
            f"| {peak.num_bytes / GIB:.2f} | +{PolicyFlops.of(sizes, plan).added:.1%} |"
        )
    return "\n".join(lines)


def regions_table():
    """Returns the table of regions, from config/regions.py."""
    again = {
        "replay": "the region",
        "discard": "the region, for the operations that read its output",
        "redraw": "the draw of the masks",
    }
    lines = ["| region | what it is | what runs again |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {facts.help} | {again[facts.method]} |" for name, facts in REGIONS.items()
    ]
    return "\n".join(lines)


def grammar():
    """Returns the grammar of a policy, from the docstring of config/policy.py."""
    lines = (policy.__doc__ or "").split("\n\n")
    (found,) = [part for part in lines if part.startswith("    policy ")]
    return textwrap.dedent(found)


def flags_page():
    """Returns docs/flags.md: every flag of the launcher, by the groups of its --help."""
    parser = build_parser()
    lines = [
        "# Flags",
        "",
        "This page is made from the parser of `pretrain_gpt.py`. Names, types and defaults are "
        "Megatron's",
        "wherever Megatron has the flag. `python pretrain_gpt.py --help ignored` lists flags of "
        "Megatron that",
        "change no result here, and `--help refused` those that are not supported, each with the "
        "reason.",
    ]
    for title, group in parser.groups().items():
        actions = [one for one in group if one.help != argparse.SUPPRESS]
        if not actions or title in ("general", "positional arguments"):
            continue
        lines += ["", f"## {title.replace('-', ' ').capitalize()}", ""]
        lines += ["| flag | meaning |", "|---|---|"]
        for action in actions:
            names = ", ".join(f"`{name}`" for name in action.option_strings)
            text = " ".join(str(action.help or "").replace("%%", "%").split())
            text = text.replace("%(default)s", str(action.default))
            lines.append(f"| {names} | {text.replace('|', chr(92) + '|').replace('<', '&lt;')} |")
    return "\n".join(lines) + "\n"


# Pictures and texts


def runs(group, by):
    """Returns the errors of the time model against runs: see benchmarks/published.py."""
    return "\n".join(published.summary(published.rows(group), by))


def picture(draw):
    """Returns a picture as SVG."""
    import matplotlib

    from megatron_lite.pages.document import STYLE, svg_text

    with matplotlib.rc_context(STYLE):
        return svg_text(draw())


def memory_figure():
    """Returns the picture of the README, as tools/plot_memory makes it."""
    from megatron_lite.memory.measure.timeline import read_timeline
    from megatron_lite.tools.plot_memory import draw

    files = [ROOT / "docs" / "records" / f"memory_{name}.json" for name in outputs.MEMORY_RUNS]
    return draw([read_timeline(str(path)) for path in files])


TEXTS = {
    "expert-ladder": partial(ladder, expert_run, EXPERT_LADDER, ranks=64),
    "grammar": grammar,
    "ladder": ladder,
    "measured-runs": partial(runs, "measured", "kind"),
    "published-runs": partial(runs, "published", "source"),
    "published-kinds": partial(runs, "published", "kind"),
    "regions": regions_table,
    "torch-versions": lambda: torch_versions.table(torch_versions.recorded()),
}
FIGURES = {
    "situations": situations,
    "right.ours": partial(right, "ours, `full`"),
    "right.torch": partial(right, "torch, non-reentrant"),
    "wrong.torch": partial(wrong, "torch, non-reentrant"),
}
FILES = {
    ROOT / "docs" / "pictures" / "memory.svg": partial(picture, memory_figure),
    ROOT / "docs" / "pictures" / "layer.svg": lambda: picture(lambda: layer_figure(drawn_run())),
    ROOT / "docs" / "flags.md": flags_page,
}
