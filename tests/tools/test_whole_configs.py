"""Whole config files, in the shape that each system ships, through translate_recompute and on into
the launcher's parser.

The files in configs/ were written for this test.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from arguments import parse_args
from megatron_lite.tools import translate_recompute
from megatron_lite.tools.config_file import read_config_file
from megatron_lite.tools.translate_recompute import translated
from megatron_lite.tools.translators import SYSTEMS, systems_of
from tests.support.commands import ended, fault_of

CONFIGS = Path(__file__).resolve().parent / "configs"
LAYER_COUNTS = (1, 2, 3, 5)
OPS = "--recompute-policy '*:ops(matmul/2,attention,collective,max)'"
WRAPPED = "--use-torch-fsdp2 --fsdp-memory-efficient-wrapping"
# File, the arguments it needs, what it prints, and the second word of each note.
TRANSLATIONS = [
    ("torchtitan_debug.toml", "--num-layers 6", "--recompute-policy every-2+1:full", []),
    (
        "torchtitan_8b.toml",
        "",
        OPS,
        [
            "per_op_sac_force_recompute_mm_shapes_by_fqns",
            "early_stop",
            "training.enable_cpu_offload",
            "parallelism.fsdp_reshard_after_forward",
            "compile",
        ],
    ),
    ("torchtitan_budget.toml", "", "--torch-compile --activation-memory-budget 0.25", []),
    ("torchtitan_default.toml", "--num-layers 2", "--recompute-policy every-2+1:full", ["the"]),
    ("torchtune_full.yaml", "", f"--recompute-policy '*:full@host' {WRAPPED}", []),
    (
        "torchtune_selective.yaml",
        "--num-layers 3",
        "--recompute-policy every-3+2:full",
        ["compile", "fsdp_cpu_offload"],
    ),
    ("torchtune_grpo.yaml", "", "--recompute-policy '*:full'", []),
    (
        "modalities_fsdp2.yaml",
        "--num-layers 4",
        "--recompute-policy every-2+1:full",
        ["layers_fqn", "the"],
    ),
    (
        "modalities_fsdp2.yaml",
        "--component unused_model",
        "--recompute-policy '*:full'",
        ["layers_fqn", "the"],
    ),
    ("modalities_fsdp1.yaml", "", "--recompute-policy '*:full'", []),
    (
        "deepspeed_zero3.json",
        "--tp 2",
        "--recompute-policy '*:full@split+host' --contiguous-saved-activations",
        ["number_checkpoints", "zero_optimization.offload_optimizer"],
    ),
    ("deepspeed_plain.json", "", "--recompute-policy '*:full'", []),
    (
        "oslo_v2.json",
        "",
        (
            "--recompute-policy '*:full@split' --contiguous-saved-activations "
            "--tensor-model-parallel-size 2"
        ),
        [],
    ),
    ("oslo_v3.json", "", "--recompute-policy '*:full@host'", []),
    ("hf_trainer.json", "", "--recompute-policy '*:full'", ["fsdp_config.offload_params"]),
    ("hf_trl.yaml", "", "--recompute-policy '*:full@host'", []),
    ("hf_axolotl.yaml", "", "--recompute-policy '*:full@host'", ["offloading"]),
    (
        "hf_automodel.yaml",
        "--num-layers 6",
        "--recompute-policy every-3+2:full",
        ["determinism_check"],
    ),
]


def launched(flags: Sequence[str], num_layers: int) -> str:
    """What the launcher says against a run with these flags, or nothing."""
    ranks = 2 if "split" in flags[1] else 1
    run = shlex.split(
        f"--num-layers {num_layers} --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--micro-batch-size 2 --max-position-embeddings 16 --attention-dropout 0 --vocab-size 64 "
        f"--tensor-model-parallel-size {ranks}"
    )
    return ended(parse_args, [*run, *flags]).err


@pytest.mark.parametrize(("file", "arguments", "printed", "notes"), TRANSLATIONS)
def test_a_whole_file_is_translated_without_saying_whose_it_is(
    file: str, arguments: str, printed: str, notes: list[str]
) -> None:
    found = ended(translate_recompute.main, f"{CONFIGS / file} {arguments}")
    assert (found.status, found.out) == (0, f"{printed}\n")
    assert [line.split()[2] for line in found.err.splitlines()] == notes
    assert launched(shlex.split(found.out), 6) == ""


def test_a_file_is_told_by_its_keys_alone(tmp_path: Path) -> None:
    """Also under a name without an ending, and as JSON. Another system's name is an error."""
    assert {path.name for path in CONFIGS.iterdir()} == {row[0] for row in TRANSLATIONS}
    for path in CONFIGS.iterdir():
        config, system = read_config_file(str(path)), path.name.partition("_")[0]
        assert systems_of(config) == (system,)
        (tmp_path / "config").write_text(path.read_text())
        (tmp_path / "config.json").write_text(json.dumps(config))
        options = "--tp 2" if system == "deepspeed" else ""
        printed = {
            ended(translate_recompute.main, f"--json {file} --from {system} {options}")
            for file in (path, tmp_path / "config", tmp_path / "config.json")
        }
        assert [one.status for one in printed] == [0]
        for other in SYSTEMS.keys() - {system}:
            error = fault(f"--from {other} {path}")
            assert f"this is a config of {system}, not of {other}: leave --from {other}" in error


def fault(words: str) -> str:
    found = fault_of(translate_recompute.main, words)
    assert found.startswith("python -m megatron_lite.tools.translate_recompute: error: ")
    return found


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", "", "not JSON"),
        ("[" * 100_000, "", "not JSON"),
        ("[]", "--from oslo", "expected an object"),
        ("{}", "--from oslo", "no section activation_checkpointing"),
        ('{"activation_checkpointing": {"a": 1, "a": 2}}', "", "'a' is given twice"),
        ('{"activation_checkpointing": {"%s": 1}}' % ("y" * 9000), "--from oslo", "unknown key"),
        ('{"activation_checkpointing": {"profile": "%s"}}' % ("y" * 9000), "", "must be bool"),
        (
            '{"tensor_parallel_size": 2, "activation_checkpointing": {"enable": true}}',
            "--tp 3",
            "c",
        ),
        ('{"gradient_checkpointing": "onload"}', "", "must be one of True, False, offload"),
        (
            '{"gradient_checkpointing": true, "activation_checkpointing": "offload"}',
            "",
            "gradient_checkpointing is True and 'offload': leave one of them out",
        ),
        (
            '{"activation_checkpointing": {"partition_activations": true}, "steps_per_print": 1, '
            '"tensor_parallel": {"autotp_size": 1}}',
            "",
            "partition_activations splits inputs over tensor-parallel ranks and needs a "
            "tensor-parallel size > 1 (got none): give --tp N",
        ),
        ('{"ac_mode": "full"}', "--tp 2", "--tp belongs to deepspeed and oslo"),
        ('{"ac_mode": "full"}', "--component a", "--component belongs to modalities"),
        ('{"ac_mode": "full"}', "--num-layers 0", "--num-layers must be at least 1 (got 0)"),
        (" " * 2**19, "", "longer than 262144 bytes"),
        # a file that tells nothing or too much asks for the system
        ('{"activation_checkpointing": {}}', "", "keys fit deepspeed and oslo: give --from"),
        ('{"learning_rate": 1}', "", "none of its keys tells: give --from"),
        ("[]", "", "none of its keys tells"),
        ('{"ac_mode": "full", "zero_optimization": {}}', "", "keys fit torchtune and deepspeed"),
        (
            '{"train_batch_size": 8}',
            "",
            "deepspeed: there is no section activation_checkpointing, so nothing is said of "
            "recomputation",
        ),
    ],
)
def test_a_file_or_an_option_that_will_not_do_is_one_line(
    text: str, arguments: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(text)
    assert message in fault(f"{tmp_path}/a.json {arguments}")


def test_a_missing_file_and_bad_flags_end_with_status_2(tmp_path: Path) -> None:
    for name in ("missing.json", "."):
        assert str(tmp_path / name) in fault(f"--json {tmp_path / name}")
    for words in ("a.json --json a.json", "a.json --from fairscale", ""):
        assert ended(translate_recompute.main, words).status == 2


def test_a_component_must_be_the_one_in_use_or_named(tmp_path: Path) -> None:
    path, text = tmp_path / "a.yaml", (CONFIGS / "modalities_fsdp2.yaml").read_text()
    instance = "instance_key: activation_checkpointed_model"
    path.write_text(text.replace(instance, "instance_key: model_raw"))
    found = ended(translate_recompute.main, str(path))
    assert found[:2] == (0, "--recompute-policy '*:none'\n")
    assert "no component activation_checkpointed is in use" in found.err
    path.write_text(text.replace("app_state:", "state:"))
    several = "activation_checkpointed_model, unused_model"
    assert f"several components recompute ({several}): give" in fault(str(path))
    error = fault(f"{path} --component optimizer")
    assert f"no component 'optimizer' recomputes (these do: {several})" in error


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_without_the_number_of_layers_a_note_says_how_many_the_launcher_asks_for(
    num_layers: int,
) -> None:
    for step in (1, 2, 4):
        translation = translated({"ac_mode": "selective", "ac_option": step}, "torchtune")
        refused = launched(translation.flags, num_layers) != ""
        assert refused == (num_layers < step)
        assert [
            f"needs a stage of {step} layers or more" in note for note in translation.notes
        ] == [True] * (step > 1)


def test_it_runs_as_a_command_without_torch() -> None:
    program = (
        "import runpy, sys; sys.argv[1:] = sys.argv[2:]; sys.modules['torch'] = None\n"
        "runpy.run_module('megatron_lite.tools.translate_recompute', run_name='__main__')"
    )
    words = [sys.executable, "-c", program, "-", str(CONFIGS / "deepspeed_zero3.json"), "--tp", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "*:full@split+host" in done.stdout, done.stderr
