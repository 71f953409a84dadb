"""The scripts of examples/: they are valid bash, and the program accepts every flag that they pass.

`DRY_RUN=1 bash examples/x.sh` prints the command that the script would start.
"""

import os
import shlex
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from arguments import parse_args
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.units import GIB
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from tests.support.commands import ROOT
from tests.support.limits import HANG_S

EXAMPLES = sorted((ROOT / "examples").rglob("*.sh"))
SOURCED = ("environment.sh", "launch.sh", "workload.sh", "restarts.sh")
LAUNCHERS = [path for path in EXAMPLES if path.name not in SOURCED]
# tests/test_large_examples.py has the others
SMALL = [path for path in LAUNCHERS if path.parent.name != "large"]
QUICKSTART = ROOT / "examples" / "quickstart.sh"
NOTHING = RecomputeConfig()
FULL = RecomputeConfig(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)


def selective(*modules):
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)


POLICIES = {
    "none": NOTHING,
    "full_uniform": FULL,
    "full_uniform_units": replace(FULL, recompute_num_layers=2),
    "full_block": replace(FULL, recompute_method="block", recompute_num_layers=2),
    "full_distributed": replace(FULL, distribute_saved_activations=True),
    "selective_core_attn": selective("core_attn"),
    "selective_pointwise": selective("core_attn", "layernorm", "activation"),
    "selective_mlp": selective("mlp"),
}


def run_script(path, *arguments, **environment):
    # From another directory, and with nothing that the caller may have set for the scripts.
    known = {"PATH", "HOME", "TMPDIR"}
    return subprocess.run(
        ["bash", str(path), *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**{name: value for name, value in os.environ.items() if name in known}, **environment},
    )


@cache
def command_of(path, *arguments, **environment):
    completed = run_script(path, *arguments, DRY_RUN="1", **environment)
    assert completed.returncode == 0, completed.stderr
    return shlex.split(completed.stdout)


def training_flags(command):
    script = next(index for index, word in enumerate(command) if word.endswith("pretrain_gpt.py"))
    assert Path(command[script]) == ROOT / "pretrain_gpt.py"
    return command[script + 1 :]


@pytest.mark.parametrize("path", SMALL)
def test_the_program_accepts_every_flag_of_an_example_as_the_flag_it_is(path):
    """And flags after it win, and it starts as many processes as its tensor-parallel size needs."""
    parsed = parse_args(training_flags(command_of(path)))
    assert parsed.config.parallel.tensor_model_parallel_size == 2
    assert not parsed.notices, "an example uses a flag without effect"
    more = () if path == QUICKSTART else ("--train-iters", "7")
    command = command_of(path, *more, TP="4", NPROC_PER_NODE="8")
    config = parse_args(training_flags(command)).config
    assert config.parallel.tensor_model_parallel_size == 4
    assert config.training.train_iters == 7 or path == QUICKSTART
    processes = int(command[command.index("--nproc_per_node") + 1])
    assert config.training.num_microbatches(config.parallel.data_parallel_size(processes)) >= 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_recompute_example_rebuilds_what_its_name_says_and_differs_in_nothing_else(name):
    policy, none = (
        parse_args(
            training_flags(command_of(ROOT / "examples" / "recompute" / f"{stem}.sh"))
        ).config
        for stem in (name, "none")
    )
    assert policy.recompute == POLICIES[name]
    # Under sequence parallelism a layer's input is split already.
    parallel = replace(
        none.parallel, sequence_parallel=not policy.recompute.distribute_saved_activations
    )
    assert policy == replace(none, recompute=policy.recompute, parallel=parallel)


def test_quickstart_takes_each_option_as_a_flag_or_from_the_environment(tmp_path):
    options = dict(corpus="stdlib", steps="30", tp="1", output=str(tmp_path))
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    by_flag = command_of(QUICKSTART, *words)
    upper = {name.upper(): value for name, value in options.items()}
    assert by_flag == command_of(QUICKSTART, **upper) != command_of(QUICKSTART)
    config = parse_args(training_flags(by_flag)).config
    assert config.training.train_iters == 30 and config.data.data_path == (
        f"{tmp_path}/data-stdlib/corpus_text_document",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "positive number (got 0)"),
        (["--tp", "3"], "divides the model's 8 heads (got 3)"),
        (["--tpu", "2"], "unknown option --tpu"),
    ],
)
def test_quickstart_refuses_a_bad_option_with_status_2(arguments, message):
    completed = run_script(QUICKSTART, *arguments)
    assert completed.returncode == 2 and message in completed.stderr


def test_a_missing_python_is_one_clear_line(tmp_path):
    completed = run_script(QUICKSTART, "--venv", str(tmp_path / "venv"), PYTHON="python2.0")
    assert completed.returncode == 1
    assert "no Python of at least 3.10 found (tried: python2.0)" in completed.stderr


def test_an_occupied_directory_is_not_turned_into_an_environment(tmp_path):
    (tmp_path / "thesis.txt").write_text("important")
    completed = run_script(ROOT / "tests" / "run.sh", VENV=str(tmp_path))
    assert completed.returncode == 1
    assert "neither a virtual environment nor empty" in completed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["train_multinode", "train_multinode_srun", "train_qwen3_30b_a3b"])
def test_a_job_script_outside_of_slurm_says_how_to_submit_it(name):
    done = run_script(ROOT / "examples" / "slurm" / f"{name}.sbatch")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{name}.sbatch: error: not started by Slurm: submit it with sbatch" in done.stderr


def test_the_job_of_a_model_with_experts_fits_its_gpus(tmp_path):
    """The job checks its flags first. A stub for `python` prints them, and fails."""
    stub = tmp_path / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@" >&2\nexit 1\n')
    stub.chmod(0o755)
    done = run_script(
        ROOT / "examples" / "slurm" / "train_qwen3_30b_a3b.sbatch",
        "--train-iters",
        "7",
        VENV=str(tmp_path),
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_NTASKS_PER_NODE="8",
        SLURM_JOB_NAME="x",
        SLURM_CPUS_PER_TASK="8",
    )
    assert done.returncode == 2
    flags = training_flags(done.stderr.split())
    config = parse_args([one for one in flags if one != "--dump-config"]).config
    assert (config.model.num_experts, config.training.train_iters) == (128, 7)
    peak = fullest_step_peak(config, device="cuda", dp_size=16)
    assert 40 * GIB < peak.num_bytes < 75 * GIB  # of the 79.18 of an H100
