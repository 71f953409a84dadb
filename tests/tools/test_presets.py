"""Other systems' configs, whole files and parts, as recompute flags: which layers, which operators,
which notes, which refusals. docs/coming-from.md has more rows, and a test of its own.

The files in configs/ were written for this test.
"""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from arguments import parse_args
from megatron_lite.config.policy import parse_policy
from megatron_lite.recompute.recompute_plan import segments
from megatron_lite.tools import translate_recompute
from megatron_lite.tools.translate_recompute import read_config_file
from megatron_lite.tools.translators import (
    OPERATORS,
    PARTITIONING,
    SYSTEMS,
    VARIANTS,
    systems_of,
    translated,
)
from tests.support.commands import ended, fault_of, python
from tests.support.pairs import in_one_test

CONFIGS = Path(__file__).resolve().parent / "configs"
OPS = "*:ops(matmul/2,attention,collective,max)"
SPLIT = "*:full@split"
WRAPPED = "--use-torch-fsdp2 --fsdp-memory-efficient-wrapping"
ENABLE = "enable_activation_checkpointing: true"
# What stands around the part of a config that a row below has.
AROUND = {
    "torchtitan": "{compile: {enable: true}, activation_checkpoint: {%s}}",
    "deepspeed": "{activation_checkpointing: {%s}, train_batch_size: 8}",
    "oslo": "{activation_checkpointing: {%s}}",
}
LAYER = "ac_variant: selective_layer_activation_checkpointing, ac_fun_params: "
OP = "ac_variant: selective_op_activation_checkpointing, ac_fun_params: "
CLASSES = "activation_checkpointing_modules"


def parsed(system, part):
    return yaml.safe_load(AROUND.get(system, "{%s}") % part)


def size(system):
    return 2 if system in PARTITIONING else None


def launched(flags, num_layers):
    """What the launcher says against a run with these flags, or nothing."""
    ranks = 2 if "split" in flags[1] else 1
    run = shlex.split(
        f"--num-layers {num_layers} --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--micro-batch-size 2 --max-position-embeddings 16 --attention-dropout 0 --vocab-size 64 "
        f"--tensor-model-parallel-size {ranks}"
    )
    return ended(parse_args, [*run, *flags]).err


# The system, its config, its policy and all further flags, and the second word of each note
PARTS = [
    ("torchtune", "", "*:none", ""),
    ("torchtune", "ac_mode: full, ac_option: 2", "*:full", "ac_option"),
    (
        "torchtune",
        f"{ENABLE}, ac_mode: selective, ac_option: 2, enable_activation_offloading: true",
        "every-2+1:full@host; *:none@host",
        "ac_mode every-2",
    ),
    (
        "torchtune",
        "s: {a: '${s.n}', n: 3}, ac_mode: selective, ac_option: '${s.a}'",
        "every-3+2:full",
        "every-3",
    ),
    ("torchtune", "custom_sharded_layers: [vision, 3]", "*:none", "custom_sharded_layers"),
    (
        "torchtitan",
        "early_stop: true, preserve_rng_state: false, determinism_check: throw, debug: true",
        "every-2+1:full",
        "early_stop determinism_check debug selective_ac_option every-2 compile",
    ),
    ("torchtitan", "force_recompute_mm_shapes_by_fqns: [a]", OPS, "force compile"),
    ("modalities", OP + "{save_ops_keys: [ops.aten.topk.default]}", "*:full+router", ""),
    ("modalities", OP + f"{{save_ops_keys: [{', '.join(OPERATORS)}]}}", OPS, ""),
    (
        "modalities",
        LAYER.replace("ac_", "sac_") + "'${p}', p: {ac_freq: 2}",
        "every-2+1:full",
        "every-2",
    ),
    ("modalities", "component_key: app", "*:none", "no"),
    ("modalities", f"{CLASSES}: [SwiGLU, LlamaDecoderLayer]", "*:full", f"{CLASSES}:"),
    ("deepspeed", "number_checkpoints: 4, profile: true", "*:full", "number_checkpoints profile"),
    ("oslo", "cpu_checkpointing: true", "*:none", "cpu_checkpointing"),
    # keys elsewhere that concern memory
    (
        "torchtune",
        "fsdp_cpu_offload: true, fsdp_reshard_after_forward: false, compile: {model: true}, "
        "model: {use_recompute: 1}, datasets: [{offload_to: disk}]",
        "*:none",
        "fsdp_cpu_offload fsdp_reshard_after_forward compile model.use_recompute "
        "datasets.0.offload_to",
    ),
    (
        "torchtune",
        "fsdp_cpu_offload: false, fsdp_reshard_after_forward: true, compile: false, b: 2",
        "*:none",
        "",
    ),
    (
        "deepspeed",
        "}, zero_optimization: {offload_param: {device: cpu}, offload_optimizer: {device: none}",
        "*:full",
        "zero_optimization.offload_param",
    ),
    (
        "hf",
        "activation_checkpointing_kwargs: {every_n_layers: 2, offload: true}, a: {enable_compile: "
        "true, fsdp_config: {activation_checkpointing: true}}",
        "*:full",
        "every_n_layers offload a.enable_compile",
    ),
    ("hf", "activation_checkpointing: selective", f"{OPS}+router", ""),
    (
        "hf",
        "gradient_checkpointing: true, gradient_checkpointing_kwargs: {selective: true, "
        "every_n_layers: 3}, activation_offloading: hidden_states",
        "every-3:ops(attention)@host",
        "",
    ),
    (
        "hf",
        "gradient_checkpointing: true, selective_checkpointing: {save: [attention, 'aten::mm'], "
        "save_sliding_window: true}",
        "*:ops(attention,matmul)",
        "save_sliding_window",
    ),
    ("deepspeed", '}, "a\\nb": {offload%s: 1' % ("x" * 120), "*:full", "'a\\nb.offload"),
]


@in_one_test("system, part, wanted, notes", PARTS)
def test_the_flags_and_the_notes(system, part, wanted, notes):
    """And the launcher accepts the flags."""
    translation = translated(parsed(system, part), system, size(system))
    assert launched(translation.flags, 6) == ""
    assert " ".join(translation.flags).removeprefix("--recompute-policy ") == wanted
    found = [note.split()[1] for note in translation.notes]
    assert all(one.startswith(note) for one, note in zip(found, notes.split(), strict=True)), found
    assert all("\n" not in note and len(note) < 400 for note in translation.notes)


# File, the arguments it needs, its policy and all further flags, and the second word of each note
FILES = [
    ("torchtitan_debug.toml", "", "every-2+1:full", "every-2"),
    (
        "torchtitan_8b.toml",
        "",
        f"'{OPS}'",
        "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop training.enable_cpu_offload "
        "parallelism.fsdp_reshard_after_forward compile",
    ),
    ("torchtitan_budget.toml", "", "--torch-compile --activation-memory-budget 0.25", ""),
    ("torchtitan_default.toml", "", "every-2+1:full", "the selective_ac_option every-2"),
    ("torchtune_full.yaml", "", f"'*:full@host' {WRAPPED}", ""),
    ("torchtune_selective.yaml", "", "every-3+2:full", "every-3 compile fsdp_cpu_offload"),
    ("torchtune_grpo.yaml", "", "'*:full'", ""),
    ("modalities_fsdp2.yaml", "", "every-2+1:full", "layers_fqn every-2"),
    ("modalities_fsdp1.yaml", "", "'*:full'", ""),
    (
        "deepspeed_zero3.json",
        "--tp 2",
        "'*:full@split+host' --contiguous-saved-activations",
        "number_checkpoints zero_optimization.offload_optimizer",
    ),
    ("deepspeed_plain.json", "", "'*:full'", ""),
    (
        "oslo_v2.json",
        "",
        f"'{SPLIT}' --contiguous-saved-activations --tensor-model-parallel-size 2",
        "",
    ),
    ("oslo_v3.json", "", "'*:full@host'", ""),
    ("hf_trainer.json", "", "'*:full'", "fsdp_config.offload_params"),
    ("hf_trl.yaml", "", "'*:full@host'", ""),
    ("hf_axolotl.yaml", "", "'*:full@host'", "offloading"),
    ("hf_automodel.yaml", "", "every-3:full", "determinism_check"),
]


@in_one_test("file, arguments, printed, notes", FILES)
def test_a_whole_file_is_told_by_its_keys_and_translated(file, arguments, printed, notes):
    found = ended(translate_recompute.main, f"{CONFIGS / file} {arguments}")
    assert found.status == 0, found.err
    assert found.out.removeprefix("--recompute-policy ") == f"{printed}\n"
    told = [line.split()[2].partition("+")[0] for line in found.err.splitlines()]
    assert told == notes.split()
    assert launched(shlex.split(found.out), 6) == ""
    system = file.partition("_")[0]
    assert systems_of(read_config_file(str(CONFIGS / file))) == (system,)
    other = "oslo" if system == "hf" else "hf"
    error = fault_of(translate_recompute.main, f"--from {other} {CONFIGS / file}")
    assert f"this is a config of {system}, not of {other}: leave --from {other}" in error


@in_one_test(
    "system, part",
    [
        ("torchtune", "ac_mode: selective, ac_option: %d"),
        ("torchtune", "ac_mode: selective, ac_option: '%d'"),
        ("torchtitan", "selective_ac_option: '%d'"),
        ("modalities", LAYER + "{ac_freq: %d}"),
        ("hf", "gradient_checkpointing: true, every_n_layers: %d"),
    ],
)
def test_every_nth_layer_is_the_one_that_their_counter_reaches(system, part):
    """They add one per layer, then rebuild the layer if n divides the count; transformers rebuilds
    before it adds. The launcher refuses a rule that names no layer, and a note says how many it
    needs."""
    first = int(system != "hf")
    for num_layers in range(1, 9):
        for step in range(1, num_layers + 3):
            flags, notes = translated(parsed(system, part % step), system)
            units = [segment.unit for segment in segments(parse_policy(flags[1]), num_layers)]
            wanted = [count % step == 0 for count in range(first, num_layers + first)]
            assert [bool(unit) for unit in units] == wanted
            assert (launched(flags, num_layers) != "") == (step > num_layers and first)
            needed = f"is for stages of {step} layers or more"
            assert any(needed in note for note in notes) == (step > 1 and first)


@in_one_test(
    "system, file, found",
    [
        ("oslo", "model_parallelism: {enable: true, tensor_parallel_size: 4}", 4),
        ("oslo", "tensor_parallelism: {enable: true, parallel_size: 8, parallel_mode: 1d}", 8),
        ("oslo", "tensor_parallel_size: 4", 4),
        ("oslo", "model_parallelism: {enable: false, tensor_parallel_size: 4}", None),
        ("deepspeed", "tensor_parallel: {autotp_size: 4}", 4),
        ("deepspeed", "tensor_parallel: {autotp_size: 1}", None),
    ],
)
def test_the_tensor_parallel_size_of_the_file_is_a_flag(system, file, found):
    split = "enable: true, partitioned_checkpointing: true"
    split = "partition_activations: true" if system == "deepspeed" else split
    config = yaml.safe_load(f"{{activation_checkpointing: {{{split}}}, {file}}}")
    asked = translated(config, system, found or 2).flags
    if found is None:
        assert asked == ("--recompute-policy", SPLIT)
        with pytest.raises(ValueError, match="give --tp N"):
            translated(config, system)
    else:
        flags = ("--recompute-policy", SPLIT, "--tensor-model-parallel-size", str(found))
        assert translated(config, system).flags == flags == asked


VARIANT = "ac_variant: full_activation_checkpointing"
# The system, its config, and what the error says
REFUSED = [
    ("torchtune", "ac_mode: selective, ac_option: 0", "(got 0)"),
    (
        "torchtune",
        "ac_mode: full, enable_activation_offloading: true",
        "needs enable_activation_checkpointing true",
    ),
    ("torchtune", "ac_mode: '${ac_mode}'", "ac_mode is '${ac_mode}', which the file does"),
    ("torchtune", "ac_mode: '${a.b}', a: {c: 1}", "does not resolve: write its value there"),
    ("torchtitan", "mode: memory_budget, memory_budget: .nan", "(got nan)"),
    ("torchtitan", "mode: memory_budget}, compile: {enable: true, components: [loss]", "model in"),
    ("torchtitan", f"selective_ac_option: '{'9' * 5000}'", "must be 'op', or it must be"),
    ("modalities", LAYER + "{freq: 2}", "unknown key 'freq' (known: ac_freq, save_ops_keys)"),
    ("modalities", OP + "{save_ops_keys: [ops.aten.addmm.default]}", "ops.aten.addmm"),
    ("modalities", f"a: {{{VARIANT}}}, b: {{{LAYER}{{}}}}", "leave one of them out"),
    ("hf", "activation_checkpointing: false, gradient_checkpointing: true", "leave one"),
    ("hf", "activation_offloading: true", "needs gradient_checkpointing"),
    ("hf", "selective_checkpointing: {}", "needs gradient_checkpointing true"),
    ("hf", "gradient_checkpointing: true, selective_checkpointing: {save: [[]]}", "none of att"),
    ("deepspeed", "partition_activations: true", "(got 1): give --tp N"),
    ("oslo", "enable: true}, tensor_parallel_size: 4, a: {", "size is 4 and 2: leave one"),
]


@in_one_test("system, part, message", REFUSED)
def test_what_they_refuse_and_what_they_would_misread_is_an_error(system, part, message):
    with pytest.raises(ValueError) as raised:
        translated(parsed(system, part), system, 2 if system == "oslo" else None)
    text = str(raised.value)
    assert message in text and "\n" not in text and len(text) < 600


PARTITION = '{"activation_checkpointing": {"partition_activations": true}, "steps_per_print": 1}'


@in_one_test(
    "text, arguments, message",
    [
        ('{"activation_checkpointing": []}', "--from oslo", "must be dict (got [])"),
        ('{"activation_checkpointing": {"a": 1, "a": 2}}', "", "'a' is given twice"),
        ('{"activation_checkpointing": {"%s": 1}}' % ("y" * 9000), "--from oslo", "unknown key"),
        ('{"activation_checkpointing": {"profile": "%s"}}' % ("y" * 9000), "", "must be bool"),
        (PARTITION, "--tp 0", "at least 1 (got 0)"),
        (" " * 2**19, "", "longer than 262144 bytes"),
        # a file that tells nothing or too much asks for the system
        ('{"activation_checkpointing": {}}', "", "keys fit deepspeed and oslo: give --from"),
        ("[]", "", "none of its keys tells: give --from"),
        ('{"ac_mode": "full", "zero_optimization": {}}', "", "keys fit torchtune and deepspeed"),
        ("missing", "missing.json", "missing.json"),
    ],
)
def test_a_file_or_an_option_that_will_not_do_is_one_line(text, arguments, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    words = arguments if text == "missing" else f"{tmp_path}/a.json {arguments}"
    assert message in fault_of(translate_recompute.main, words)
    assert ended(translate_recompute.main, "a.json --json a.json").status == 2


def test_it_runs_as_a_command_without_torch():
    program = (
        "import runpy, sys; sys.argv[1:] = sys.argv[2:]; sys.modules['torch'] = None\n"
        "runpy.run_module('megatron_lite.tools.translate_recompute', run_name='__main__')"
    )
    done = python(program, "-", str(CONFIGS / "deepspeed_zero3.json"), "--tp", "2")
    assert "*:full@split+host" in done.stdout


def _words():
    """Any JSON, rich in the words and types that the presets look for."""
    known = [key for row in SYSTEMS.values() for table in row.tables for key in table.keys]
    known += shlex.split(
        "compile component_key config model settings training job fsdp tensor_parallel "
        "block_names model_parallelism ${mode} ${ac_fun_params} full selective op none 2"
    )
    words = st.one_of(st.sampled_from([*known, *VARIANTS, *OPERATORS]), st.text(max_size=4))
    leaves = st.one_of(words, st.booleans(), st.none(), st.integers(), st.floats())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)
        ),
        max_leaves=12,
    )


@pytest.mark.parametrize("system", SYSTEMS)
@given(config=_words())
def test_any_json_is_translated_or_refused(system, config):
    """And what is translated says the same as text, also after a shell has split it."""
    try:
        translation = translated(json.loads(json.dumps(config)), system, size(system))
    except ValueError as error:
        assert "\n" not in str(error)
        return
    words = shlex.split(shlex.join(translation.flags))
    assert all("\n" not in note for note in translation.notes)
    if words[0] == "--recompute-policy":
        assert str(parse_policy(words[1])) == words[1]
    else:
        assert 0.0 <= float(words[2]) <= 1.0
