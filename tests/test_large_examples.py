"""examples/large/: the layouts are the published ones, the figures in the scripts and in their
table are what the code predicts, and each script trains with the sizes of SIZE=tiny.
"""

import functools
import re

import pytest

from arguments import parse_args
from megatron_lite.config.units import GIB
from megatron_lite.memory.explain.recompute_report import explain
from megatron_lite.memory.predict.states import rank_parameter_count
from tests.test_examples import ROOT, command_of, training_flags

LARGE = ROOT / "examples" / "large"
STATE_BYTES = 18  # of a parameter: bf16 weight; float32 gradient, master weight and two moments
POINTWISE, FULL = "RECOMPUTE=pointwise", "RECOMPUTE=full"
UNFUSED = "--attention-backend unfused"
PAPER = f"RECOMPUTE=core_attn {UNFUSED}"
TWICE = "--num-virtual-stages-per-pipeline-rank 2"
AS_IT_IS = "as it is"
HEADING = "#      kept, bytes   in flight   at the peak, bytes  in all, GiB"


def config_of(name, settings="", **environment):
    """settings: variables, then flags, as they are written around a script's name."""
    variables = dict(word.split("=") for word in settings.split() if re.match("[A-Z_]+=", word))
    flags = settings.split()[len(variables) :]
    parsed = parse_args(
        training_flags(command_of(LARGE / f"{name}.sh", *flags, **variables, **environment))
    )
    assert not parsed.notices, "an example uses a flag without effect"
    return parsed.config


def processes(command):
    per_node = int(command[command.index("--nproc_per_node") + 1])
    return per_node * (int(command[command.index("--nnodes") + 1]) if "--nnodes" in command else 1)


class Facts:
    """What is predicted of a script's first pipeline rank."""

    def __init__(self, name, settings=""):
        self.config = config_of(name, settings)
        first = explain(self.config, "cuda").ranks[0]
        self.kept_bytes, self.in_flight = first.kept_bytes, first.in_flight
        self.peak_bytes = first.peak_bytes
        self.in_all_gib = (
            STATE_BYTES * rank_parameter_count(self.config, 0) + self.peak_bytes
        ) / GIB
        self.ranks = processes(command_of(LARGE / f"{name}.sh"))
        parallel = self.config.parallel
        self.num_chunks = parallel.num_virtual_stages_per_pipeline_rank or 1
        self.replicas = parallel.data_parallel_size(self.ranks)


@functools.cache
def facts_of(name, settings=""):
    return Facts(name, settings)


# layers, hidden size, heads, query groups, ffn size; sequence; tensor-, pipeline- and
# virtual-parallel size, GPUs; global and micro-batch. 2205.05198, table 3 and section 6; Meta's
# params.json of Llama 3, whose layouts are ours.
PUBLISHED = {
    "gpt_22b": ((48, 6144, 64, 64, 24576), 2048, (8, 1, 1, 8), (4, 4)),
    "gpt_175b": ((96, 12288, 96, 96, 49152), 2048, (8, 8, 3, 64), (64, 1)),
    "gpt_530b": ((105, 20480, 128, 128, 81920), 2048, (8, 35, 3, 280), (280, 1)),
    "gpt_1t": ((128, 25600, 160, 160, 102400), 2048, (8, 64, 1, 512), (512, 1)),
    "llama3_8b": ((32, 4096, 32, 8, 14336), 8192, (4, 1, 1, 8), (512, 1)),
    "llama3_70b": ((80, 8192, 64, 8, 28672), 8192, (8, 4, 5, 64), (512, 1)),
}
PREDICTED = {
    name: ["", POINTWISE, FULL] + ([UNFUSED, PAPER] if name.startswith("gpt") else [])
    for name in PUBLISHED
}
PREDICTED["gpt_1t"] += [TWICE, f"{POINTWISE} {TWICE}"]


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_and_layout_are_the_published_ones(name):
    facts = facts_of(name)
    model, parallel, training = facts.config.model, facts.config.parallel, facts.config.training
    names = "num_layers hidden_size num_attention_heads query_groups ffn_size"
    shape = tuple(getattr(model, name) for name in names.split())
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    layout = (*sizes, facts.num_chunks, facts.ranks)
    batch = (training.batch_size(facts.replicas), training.micro_batch_size)
    assert (shape, facts.config.data.seq_length, layout, batch) == PUBLISHED[name]
    assert parallel.sequence_parallel and training.bf16
    llama = name.startswith("llama")
    assert facts.config.tokenizer.rows(layout[0]) == (128256 if llama else 51200)
    assert facts.replicas == 1 or llama  # the paper's layouts have no data parallelism
    if llama:
        assert (model.rotary_base, model.normalization, model.swiglu, model.add_bias_linear) == (
            500000,
            "RMSNorm",
            True,
            False,
        )


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_header_has_the_predicted_bytes(name):
    expected = [HEADING]
    for settings in PREDICTED[name]:
        facts = facts_of(name, settings)
        expected += [
            f"#   {settings or AS_IT_IS}",
            f"#   {facts.kept_bytes:14,}{facts.in_flight:12}{facts.peak_bytes:21,}"
            f"{facts.in_all_gib:13.1f}",
        ]
    source = (LARGE / f"{name}.sh").read_text()
    assert source[source.index(HEADING) :].split("\n#\n")[0] == "\n".join(expected)


def test_several_machines_meet_where_they_are_told():
    command = command_of(
        LARGE / "gpt_175b.sh", NODE_RANK="3", MASTER_ADDR="node0", MASTER_PORT="6001"
    )
    launch = "torchrun --nnodes 8 --node_rank 3 --master_addr node0 --master_port 6001"
    assert command[:11] == [*launch.split(), "--nproc_per_node", "8"]
    assert "--standalone" in command_of(LARGE / "gpt_22b.sh") and "--standalone" not in command


def test_a_task_of_srun_is_one_rank():
    command = command_of(LARGE / "gpt_530b.sh", LAUNCHER="srun")
    assert command[:3] == ["python", "-u", str(ROOT / "pretrain_gpt.py")]
    assert command[3:] == training_flags(command_of(LARGE / "gpt_530b.sh"))
