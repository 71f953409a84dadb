"""Whole config files, in the shape that each system ships, through translate_recompute and on into
the launcher's parser.

The files in configs/ were written for this test.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from arguments import parse_args
from megatron_lite.tools import translate_recompute
from megatron_lite.tools.config_file import read_config_file
from megatron_lite.tools.translate_recompute import translated
from megatron_lite.tools.translators import PARTITIONING, SYSTEMS, systems_of

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


def launched(flags: tuple[str, ...], num_layers: int) -> str:
    """What the launcher says against a run with these flags, or nothing."""
    ranks = 2 if "split" in flags[1] else 1
    run = shlex.split(
        f"--num-layers {num_layers} --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--micro-batch-size 2 "
        "--max-position-embeddings 16 --attention-dropout 0 --tensor-model-parallel-size "
        f"{ranks} --vocab-size 64"
    )
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
            parse_args([*run, *flags])
        except SystemExit:
            return shown.getvalue()
    return ""


@pytest.mark.parametrize(("file", "arguments", "printed", "notes"), TRANSLATIONS)
def test_a_whole_file_is_translated_without_saying_whose_it_is(
    file: str, arguments: str, printed: str, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate_recompute.main([str(CONFIGS / file), *arguments.split()]) == 0
    out, err = capsys.readouterr()
    assert out == printed + "\n"
    assert [line.split()[2] for line in err.splitlines()] == notes
    assert launched(tuple(shlex.split(out)), 6) == ""


def test_a_file_is_told_by_its_keys_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also under a name without an ending, and as JSON. Another system's name is an error."""
    assert {path.name for path in CONFIGS.iterdir()} == {row[0] for row in TRANSLATIONS}
    for path in CONFIGS.iterdir():
        config, system = read_config_file(str(path)), path.name.partition("_")[0]
        assert systems_of(config) == (system,)
        (tmp_path / "config").write_text(path.read_text())
        (tmp_path / "config.json").write_text(json.dumps(config))
        printed = set()
        for file in (path, tmp_path / "config", tmp_path / "config.json"):
            options = ["--tp", "2"] if system == "deepspeed" else []
            assert translate_recompute.main(["--json", str(file), "--from", system, *options]) == 0
            printed.add(capsys.readouterr())
        assert len(printed) == 1
        for other in SYSTEMS.keys() - {system}:
            error = fault(["--from", other, str(path)], capsys)
            assert f"this is a config of {system}, not of {other}: leave --from {other}" in error


def fault(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a run that must end with status 2 and print no flags."""
    capsys.readouterr()
    assert translate_recompute.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 800
    assert err.startswith("python -m megatron_lite.tools.translate_recompute: error: ")
    return err


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
    ],
)
def test_a_file_or_an_option_that_will_not_do_is_one_line(
    text: str, arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(text)
    assert message in fault([str(tmp_path / "a.json"), *arguments.split()], capsys)


def test_a_missing_file_and_bad_flags_end_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("missing.json", "."):
        assert str(tmp_path / name) in fault(["--json", str(tmp_path / name)], capsys)
    for words in (["a.json", "--json", "a.json"], ["a.json", "--from", "fairscale"], []):
        with pytest.raises(SystemExit) as stopped:
            translate_recompute.main(words)
        assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"activation_checkpointing": {"cpu_checkpointing": true}}',
            "its keys fit deepspeed and oslo: give --from",
        ),
        ('{"activation_checkpointing": {}}', "its keys fit deepspeed and oslo: give --from"),
        ('{"learning_rate": 1}', "none of its keys tells: give --from"),
        ("[]", "none of its keys tells"),
        ('{"ac_mode": "full", "zero_optimization": {}}', "its keys fit torchtune and deepspeed"),
        (
            '{"train_batch_size": 8}',
            (
                "deepspeed: there is no section activation_checkpointing, so nothing is said of "
                "recomputation"
            ),
        ),
    ],
)
def test_a_file_that_tells_nothing_or_too_much_asks_for_the_system(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(text)
    assert message in fault([str(tmp_path / "a.json")], capsys)


def test_a_component_that_the_run_does_not_use_recomputes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        (CONFIGS / "modalities_fsdp2.yaml")
        .read_text()
        .replace("instance_key: activation_checkpointed_model", "instance_key: model_raw")
    )
    assert translate_recompute.main([str(path)]) == 0
    out, err = capsys.readouterr()
    assert (
        out == "--recompute-policy '*:none'\n"
        and "no component activation_checkpointed is in use" in err
    )


def test_of_several_components_one_must_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text((CONFIGS / "modalities_fsdp2.yaml").read_text().replace("app_state:", "state:"))
    several = "activation_checkpointed_model, unused_model"
    assert f"several components recompute ({several}): give" in fault([str(path)], capsys)
    error = fault([str(path), "--component", "optimizer"], capsys)
    assert f"no component 'optimizer' recomputes (these do: {several})" in error


def configs() -> Iterator[tuple[str, Any]]:
    """(system, config) of each kind of setting."""
    for enabled, mode, option in itertools.product(
        (False, True), (None, "full", "selective"), (2, 4, "op")
    ):
        more = dict(enable_activation_offloading=enabled, memory_efficient_wrapping=option == 2)
        recipe = dict(enable_activation_checkpointing=enabled, ac_mode=mode, ac_option=option)
        yield "torchtune", {**recipe, **more}
    for mode, option in itertools.product(("none", "full", "selective"), ("1", "3", "op")):
        yield (
            "torchtitan",
            {"activation_checkpoint": {"mode": mode, "selective_ac_option": option}},
        )
    for step in (1, 9):
        variant = "selective_layer_activation_checkpointing"
        yield "modalities", {"ac_variant": variant, "ac_fun_params": {"ac_freq": step}}
    for name in ("GPT2Block", "TransformerMLP"):
        yield "modalities", {"activation_checkpointing_modules": [name]}
        yield "hf", {"gradient_checkpointing": True, "every_n_layers": 3 if name else 1}
    for split, host in itertools.product((False, True), repeat=2):
        section = {"partition_activations": split, "cpu_checkpointing": host}
        section |= {"contiguous_memory_optimization": split}
        yield "deepspeed", {"activation_checkpointing": section}


@pytest.mark.parametrize("num_layers", LAYER_COUNTS)
def test_the_launcher_accepts_every_translation(num_layers: int) -> None:
    accepted = lru_cache(launched)
    for system, config in configs():
        translation = translated(
            config, system, 2 if system in PARTITIONING else None, num_layers=num_layers
        )
        assert accepted(translation.flags, num_layers) == "", (config, translation)
    assert accepted.cache_info().currsize > 10


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
