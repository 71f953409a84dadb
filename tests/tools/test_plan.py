"""The planner's command line: its verdicts, its command, its JSON and its errors."""

import json
import re
import shlex

import pytest

from arguments import parse_args
from megatron_lite.config.other_ways import num_processes, without_launcher
from megatron_lite.config.run import RunConfig
from megatron_lite.tools import plan
from tests.config.test_hf_config import LLAMA_3_8B
from tests.docs.marks import ROOT
from tests.plan.runs import small_run
from tests.support.commands import ended, fault_of

SMALL = ("--model", "gpt2", "--gpu", "h100", "--global-batch-size", "64")
LLAMA = ("--model", "llama3-8b", "--gpu", "h100-80gb", "--seq-length", "8192")
BATCH = ("--global-batch-size", "64")
ONE = ("--micro-batch-size", "1", "--pipeline-model-parallel-size", "1", "--seq-length", "1024")


def printed(arguments, status=0):
    found = ended(plan.main, arguments)
    assert (found.status, found.err) == (status, "")
    return found.out


def planned(text):
    """Returns the configuration of the command in a text."""
    words = shlex.split(text.partition("To run plan 1:")[2].partition("(")[0])
    return parse_args([word for word in words if word != "\n"][6:]).config


def verdict_of(arguments):
    """Returns the one verdict on a plan that fits, and its first plan."""
    (verdict,) = json.loads(printed([*arguments, "--json", "-"]))["verdicts"]
    return verdict, verdict["plans"][0]


def test_the_printed_command_is_parsed_to_the_plan():
    arguments = [
        *LLAMA,
        *BATCH,
        *shlex.split(
            "--pipeline-model-parallel-size=2 --gpus 8 --memory-budget 40GiB --host-memory 0 "
            "--tensor-model-parallel-size=2 --context-parallel-size 1 --micro-batch-size 1"
        ),
    ]
    _, best = verdict_of(arguments)
    config = RunConfig.from_json(json.dumps(best["config"]))
    place = best["command"].index("-m")  # runs in any directory, unlike the path of a script
    assert best["command"][place:][:3] == ["-m", "megatron_lite", "train"]
    assert parse_args(best["command"][place + 3 :]).config == config
    text = printed(arguments)
    command = text[text.index("torchrun") :].partition("\n(")[0]
    assert shlex.split(command.replace("\\\n", " ")) == best["command"]
    assert config.parallel.model_ranks == 4


@pytest.mark.parametrize(
    "before, count",
    [
        ("X=1 OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 --nnodes=2 pretrain_gpt.py", 4),
        ("srun --mem 8 python3 -u -m torch.distributed.launch --nproc-per-node 4 /a/b.py", 4),
        ("/x/torchrun --nproc-per-node 4 -m megatron_lite train", 4),
        ("srun -N 2 --nodes 2 python pretrain_gpt.py", None),
        ("torchrun --nproc-per-node gpu pretrain_gpt.py", None),
        ("pretrain_gpt.py", None),
    ],
)
def test_the_words_that_start_a_program_are_taken_out(before, count):
    own, flags = ["--gpu", "h100"], ["--data-path", "1 a b", "--bf16"]
    left, started = without_launcher([*own, *before.split(), *flags])
    assert (left, started) == ([*own, *flags], before)
    assert num_processes(started) == (count and str(count))
    pasted = shlex.join([*before.split(), *flags]).replace(" --", " \\\n  --")
    if ".py" in before:
        assert without_launcher([*own, pasted]) == (left, before)
    assert without_launcher([*own, *flags]) == ([*own, *flags], "")


def test_a_whole_command_line_is_planned_on_the_ranks_that_it_starts():
    before, fixed = "X=1 torchrun --nproc-per-node 2 pretrain_gpt.py", ["--use-flash-attn", *ONE]
    plans = verdict_of([*SMALL, "--gpus", "2", *fixed])
    assert verdict_of([*SMALL, *before.split(), *fixed]) == plans
    assert verdict_of([*SMALL, "--gpus", "2", *before.replace("2", "3").split(), *fixed]) == plans
    text = " ".join(printed([*SMALL, *before.split(), *fixed]).split())
    assert f"note: left out, but for the number of GPUs: {before}" in text
    fault = fault_of(plan.main, [*SMALL, "torchrun a.py --lr '3"])
    assert "a whole command line in one word: No closing quotation" in fault


@pytest.mark.long
def test_a_plan_that_cannot_fit_ends_with_status_2_and_the_smallest_peak():
    one = [*LLAMA, *BATCH, "--gpus", "1", "--micro-batch-size", "1", "--host-memory", "0"]
    text = printed(one, status=2)
    assert "does not fit" in text and "The smallest peak that was found is" in text
    assert "optimizer states" in text and "To run" not in text
    # bytes of a parameter: main weight in float32, and weight, gradient and moments in bf16
    states = 8_030_261_248 * 12 / 2**30
    assert f"states alone take {states:.2f} GiB" in text.replace("\n", " ")


@pytest.mark.long
def test_a_long_sequence_on_one_card_takes_tiles_chunks_and_host_memory_by_itself():
    length = "262144"
    found, best = verdict_of([*LLAMA[:-1], length, "--gpus", "1"])
    config = parse_args(best["command"][best["command"].index("train") + 1 :]).config
    assert re.search(r"full\+mlp/\d+@host", str(config.recompute.policy))
    assert config.optimizer.optimizer_cpu_offload and config.training.loss_chunk_size
    assert found["verdict"] == "fits" and str(config.data.seq_length) == length
    first, rules = config.recompute.policy.rules[0], config.recompute.policy.rules
    assert "@host" in str(first) and not any("@host" in str(one) for one in rules[1:])
    hosted = sum(number in first.layers[0] for number in range(config.model.num_layers))
    assert best["kept_on_host_bytes"] == hosted * int(length) * 4096 * 2


@pytest.mark.long
def test_where_none_fits_a_command_has_the_fewest_gpus_that_are_enough():
    fixed = shlex.split(
        "--reserve 0 --memory-budget 1GiB --context-parallel-size 1 --host-memory 0 "
        "--tensor-model-parallel-size=1 --pipeline-model-parallel-size 1 --micro-batch-size 1"
    )
    text = printed([*SMALL, *fixed, "--gpus", "1"], status=2)
    found = re.search(r"fits on (\d+) GPUs.*: give --gpus (\d+)\n$", text)
    assert found is not None and found[1] == found[2]
    half = [*SMALL, *fixed, f"--gpus={int(found[1]) // 2}"]
    assert printed(half, status=2).endswith(f"--gpus {found[1]}\n")


@pytest.mark.parametrize(
    "gpus, nodes",
    [
        (3, "--nproc-per-node 3 -m"),
        (8, "--nproc-per-node 8 -m"),
        (12, "--nproc-per-node 4 --nnodes 3"),
        (16, "--nproc-per-node 8 --nnodes 2"),
    ],
)
def test_the_command_starts_no_more_nodes_than_the_ranks_need(gpus, nodes):
    fixed = (
        "--micro-batch-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        f"--context-parallel-size 1 --global-batch-size 48 --gpus {gpus}"
    )
    assert f"torchrun {nodes}" in printed([*SMALL[:4], *fixed.split()]).replace("\\\n  ", "")


def test_models_come_from_presets_files_runs_and_flags(tmp_path):
    hf, run = tmp_path / "config.json", tmp_path / "run.json"
    hf.write_text(LLAMA_3_8B)
    run.write_text(small_run(parallel={"tensor_model_parallel_size": 2}).to_json())
    rest = [*LLAMA[2:], "--gpus", "8", *BATCH, "--tensor-model-parallel-size=8"]
    assert verdict_of(["--hf-config", str(hf), *rest]) == verdict_of([*LLAMA[:2], *rest])
    one = ["--gpu", "a100", "--gpus", "1"]
    found = verdict_of(["--config-json", str(run), *one])[1]["config"]
    # The layout of the file does not count, its model and its batch do.
    assert found["parallel"]["tensor_model_parallel_size"] == 1
    assert found["model"]["hidden_size"] == 1024 and found["training"]["global_batch_size"] == 16
    sizes = "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 512"
    more = "--vocab-size 999 --swiglu --disable-bias-linear --window-size 127,0"
    model = verdict_of([*one, *sizes.split(), *more.split(), *BATCH])[1]["config"]["model"]
    assert model["swiglu"] and not model["add_bias_linear"] and model["window_size"] == [127, 0]


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--gpu", "h100"], "missing --seq-length"),
        (["--gpu", "h100", "--seq-length", "8"], "missing --num-layers.*give a model"),
        (["--model", "gpt2"], "give the machine once: --gpu NAME"),
        (["--model", "gpt2", "--gpu", "h900"], "no machine is called 'h900': give one of a100"),
        (["--model", "gpt9", "--gpu", "h100"], "'gpt9' is not known: give one of gpt2"),
        ([*SMALL, "--gpus", "0"], "--gpus '0': give up to"),
        ([*SMALL, "--gpus", "8", "--tensor-model-parallel-size", "5"], "8 GPUs: .*5"),
        ([*SMALL, "--gpus=8", "--context-parallel-size=5", "--html=no/p.html"], "no/p.html cannot"),
        ([*SMALL, "--gpus", "8", "--reserve", "90GiB"], "leaves nothing"),
        ([*SMALL, "--gpus", "8", "--memory-budget", "40"], "40 bytes .* a unit such as 40GiB"),
        ([*SMALL, "--hf-config", "nowhere.json"], "excludes --hf-config: each describes"),
        (["--model", "gpt2", "--machine", "here.txt"], "must end in .json"),
        ([*SMALL, "--gpus", "1", "--html", "plan.txt"], "must end in .html"),
        ([*SMALL, "--gpus", "8", "--memory-limit", "0"], "--memory-limit .0. must be at least 1"),
        ([*SMALL, "--xyz", "3", "--fp8-format", "e4m3"], "--xyz: .*; Megatron's --fp8-format is"),
        ([*SMALL, "--mtp-num-layers", "1"], "--mtp-num-layers 1 is not supported here, only 0"),
    ],
)
def test_a_fault_in_the_input_is_one_line(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(reason, fault_of(plan.main, arguments))


def test_a_whole_line_of_a_launch_script_is_planned():
    """It names what it leaves out, and what it assumes for want of the tokenizer's files."""
    lines = json.loads((ROOT / "tests/command_lines/nvidia_gpt_tests.json").read_text())
    names = "gpt3_mcore_te_tp2_pp1_", "--use-distributed-optimizer"
    line = next(one for one in lines if names[0] in one["source"] and names[1] in one["arguments"])
    text = printed([*line["arguments"], "--gpu", "h100", "--gpus", "4"])
    said = " ".join(text.split())
    assert "--vocab-size 50257 is assumed: a plan reads no file of the GPT2BPETokenizer" in said
    assert "flags have no effect here" in said and "--transformer-impl" in said
    padded = ["--padded-vocab-size", "40064", "--gpu", "h100", "--gpus", "4"]
    assert "--vocab-size 40064 is assumed" in printed([*line["arguments"], *padded])
    found, given = planned(text), parse_args(line["arguments"]).config
    assert (found.model, found.data) == (given.model, given.data)
    assert found.optimizer == given.optimizer
    assert found.parallel.tensor_model_parallel_size == 2


def test_a_memory_limit_is_the_memory_of_a_plan():
    arguments = [*SMALL, "--memory-limit", "4GiB"]
    verdict, _ = verdict_of(arguments)
    assert verdict["num_gpus"] == 1, "without --gpus, the fewest that are enough"
    assert (verdict["memory_bytes"], verdict["reserve_bytes"]) == (4 * 2**30, 0)
    assert all(one["peak_bytes"] <= 4 * 2**30 for one in verdict["plans"])
    assert "--memory-limit 4GiB is the memory that a plan may take" in printed(arguments)


def test_an_update_on_the_host_may_take_no_time(tmp_path):
    file = tmp_path / "fast.json"
    file.write_text('{"like": "h100-80gb", "host_memory_bandwidth": 1e24, "host_bandwidth": 1e24}')
    flags = (
        "--model gpt2 --gpus 1 --micro-batch-size 1 --optimizer-cpu-offload "
        "--use-distributed-optimizer --use-precision-aware-optimizer --machine"
    )
    assert "in host memory" in printed([*flags.split(), str(file)])


def test_the_policy_auto_is_what_the_planner_searches():
    arguments = [*SMALL, "--gpus", "1", "--memory-budget", "5GiB", "--micro-batch-size=8"]
    own = verdict_of(arguments)
    assert verdict_of([*arguments, "--recompute-policy", "auto"]) == own
    assert own[1]["recompute_policy"] != "*:none"
