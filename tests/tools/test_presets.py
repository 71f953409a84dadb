"""Other systems' configs as recompute policies: which layers, which operators, which refusals."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import check_policy_reaches, parse_policy
from megatron_lite.recompute.recompute_plan import segments
from megatron_lite.tools.translate_recompute import translated
from megatron_lite.tools.translation import Translation
from megatron_lite.tools.translators import OPERATORS, PARTITIONING, SYSTEMS, VARIANTS
from tests.support.pairs import in_one_test
from tests.tools.test_whole_configs import LAYER_COUNTS, launched

OPS = "*:ops(matmul/2,attention,collective,max)"
ENABLE = "enable_activation_checkpointing: true"
# What stands around the part of a config that a row below has.
AROUND = {
    "torchtune": "{%s}",
    "torchtitan": "{activation_checkpoint: {%s}, compile: {enable: true}}",
    "modalities": "{%s}",
    "deepspeed": "{activation_checkpointing: {%s}, train_batch_size: 8}",
    "oslo": "{activation_checkpointing: {%s}}",
    "hf": "{%s}",
}
LAYER = "ac_variant: selective_layer_activation_checkpointing, ac_fun_params: "
OP = "ac_variant: selective_op_activation_checkpointing, ac_fun_params: "
CLASSES = "activation_checkpointing_modules"


def of(system: str, part: str, tp_size: int | None = None) -> Translation:
    return translated(yaml.safe_load(AROUND[system] % part), system, tp_size)


@pytest.mark.parametrize(
    ("system", "part"),
    [
        ("torchtune", "ac_mode: selective, ac_option: %d"),
        ("torchtune", "ac_mode: selective, ac_option: '%d'"),
        ("torchtitan", "selective_ac_option: '%d'"),
        ("modalities", LAYER + "{ac_freq: %d}"),
    ],
)
def test_every_nth_layer_is_the_one_that_their_counter_reaches(system: str, part: str) -> None:
    """They add one per layer, then rebuild the layer if n divides the count. Here that holds for
    every model, not the first."""
    for num_layers in range(1, 9):
        for step in range(1, num_layers + 3):
            policy = of(system, part % step).policy
            units = [segment.unit for segment in segments(policy, num_layers)]
            if step <= num_layers:
                assert units == [count % step == 0 for count in range(1, num_layers + 1)]
            else:
                assert not any(units)


SPLIT = "--recompute-policy *:full@split"
WRAPPED = "--recompute-policy *:full --use-torch-fsdp2 --fsdp-memory-efficient-wrapping"
# The system, its config, what it becomes (a policy, or all flags), and the first words of the
# notes. docs/coming-from.md has more rows, and a test of its own.
POLICIES: list[tuple[str, str, str, list[str]]] = [
    ("torchtune", "", "*:none", []),
    ("torchtune", f"{ENABLE}, ac_mode: selective, ac_option: 2", "every-2+1:full", ["ac_mode"]),
    ("torchtune", "ac_mode: full, ac_option: 2", "*:full", ["ac_option"]),
    (
        "torchtune",
        f"{ENABLE}, ac_mode: selective, ac_option: 2, enable_activation_offloading: true",
        "every-2+1:full@host; *:none@host",
        ["ac_mode"],
    ),
    (
        "torchtune",
        "s: {a: '${s.n}', n: 3}, ac_mode: selective, ac_option: '${s.a}'",
        "every-3+2:full",
        [],
    ),
    ("torchtune", f"{ENABLE}, fsdp: {{memory_efficient_wrapping: true}}", WRAPPED, []),
    (
        "torchtune",
        f"{ENABLE}, custom_sharded_layers: [decoder.output, tok_embeddings]",
        WRAPPED,
        [],
    ),
    ("torchtune", f"{ENABLE}, custom_sharded_layers: [output]", WRAPPED, ["custom_sharded_layers"]),
    ("torchtune", "custom_sharded_layers: [vision, 3]", "*:none", ["custom_sharded_layers"]),
    ("torchtitan", "", "every-2+1:full", ["compile"]),  # the defaults of torchtitan
    ("torchtitan", "mode: full, memory_budget: 0.5", "*:full", ["memory_budget", "compile"]),
    ("torchtitan", "selective_ac_option: 3", "every-3+2:full", ["compile"]),
    (
        "torchtitan",
        "selective_ac_option: op, per_op_sac_force_recompute_mm_shapes_by_fqns: [moe.router.gate]",
        OPS,
        ["per_op_sac_force_recompute_mm_shapes_by_fqns", "compile"],
    ),
    (
        "torchtitan",
        "mode: memory_budget, memory_budget: 1",
        "--torch-compile --activation-memory-budget 1.0",
        [],
    ),
    (
        "torchtitan",
        "early_stop: true, preserve_rng_state: false, determinism_check: throw, debug: true",
        "every-2+1:full",
        ["early_stop", "determinism_check", "debug", "compile"],
    ),
    (
        "modalities",
        "ac_variant: full_activation_checkpointing, layers_fqn: h",
        "*:full",
        ["layers_fqn"],
    ),
    ("modalities", OP + "{save_ops_keys: [ops.aten.max.default]}", "*:ops(max)", []),
    ("modalities", OP + "{save_ops_keys: [ops.aten.topk.default]}", "*:full+router", []),
    ("modalities", OP + f"{{save_ops_keys: [{', '.join(OPERATORS)}]}}", OPS, []),
    ("modalities", LAYER.replace("ac_", "sac_") + "{ac_freq: 2}", "every-2+1:full", []),
    ("modalities", f"{CLASSES}: null", "*:none", []),
    ("modalities", f"{CLASSES}: [SwiGLU, LlamaDecoderLayer]", "*:full", [f"{CLASSES}:"]),
    ("deepspeed", "profile: false, number_checkpoints: null", "*:full", []),
    (
        "deepspeed",
        "number_checkpoints: 4, profile: true",
        "*:full",
        ["number_checkpoints", "profile"],
    ),
    ("deepspeed", "partition_activations: true", "*:full@split", []),
    (
        "deepspeed",
        "partition_activations: true, contiguous_memory_optimization: true",
        f"{SPLIT} --contiguous-saved-activations",
        [],
    ),
    ("oslo", "cpu_checkpointing: true", "*:none", ["cpu_checkpointing"]),
]


@pytest.mark.parametrize(("system", "part", "wanted", "notes"), POLICIES)
def test_the_flags_and_the_notes(system: str, part: str, wanted: str, notes: list[str]) -> None:
    """And for every number of layers the launcher accepts the flags."""
    translation = SYSTEMS[system](
        yaml.safe_load(AROUND[system] % part), **({"tp_size": 2} if system in PARTITIONING else {})
    )
    for num_layers in LAYER_COUNTS:
        assert launched(translation.for_layers(num_layers).flags, num_layers) == ""
    words = wanted.split() if wanted.startswith("--") else ["--recompute-policy", wanted]
    assert translation.flags == tuple(words)
    assert [note.split()[1] for note in translation.notes] == notes


WITH_SPLIT = "activation_checkpointing: {enable: true, partitioned_checkpointing: true}"


@pytest.mark.parametrize(
    ("system", "file", "size"),
    [
        ("oslo", "model_parallelism: {enable: true, tensor_parallel_size: 4}", 4),
        ("oslo", "tensor_parallelism: {enable: true, parallel_size: 8, parallel_mode: 1d}", 8),
        ("oslo", "tensor_parallel_size: 4", 4),
        ("oslo", "model_parallelism: {enable: false, tensor_parallel_size: 4}", None),
        ("deepspeed", "tensor_parallel: {autotp_size: 4}", 4),
    ],
)
def test_the_tensor_parallel_size_of_the_file_is_a_flag(
    system: str, file: str, size: int | None
) -> None:
    text = f"{{{file}, {WITH_SPLIT}}}"
    if system == "deepspeed":
        text = text.replace("enable: true, partitioned_checkpointing", "partition_activations")
    config = yaml.safe_load(text)
    if size is None:
        with pytest.raises(ValueError, match="give --tp N"):
            translated(config, system)
        return
    flags = (*SPLIT.split(), "--tensor-model-parallel-size", str(size))
    assert translated(config, system).flags == flags == translated(config, system, size).flags


@in_one_test("step, num_layers", itertools.product((1, 2, 5, 9), (1, 2, 4, 9)))
def test_for_a_number_of_layers_no_rule_names_nothing(step: int, num_layers: int) -> None:
    """And the layers that remain recompute what they did."""
    for more, rest in (
        ("", "*:none"),
        (f", {ENABLE}, enable_activation_offloading: true", "@host"),
    ):
        whole = SYSTEMS["torchtune"](
            yaml.safe_load(f"{{ac_mode: selective, ac_option: {step}{more}}}")
        )
        part = whole.for_layers(num_layers)
        assert check_policy_reaches(part.policy, [num_layers]) == []
        assert (part == whole) == (step <= num_layers)
        if num_layers < step:
            assert str(part.policy).endswith(rest) and ":none" in str(part.policy)
            assert f"names no layer of {num_layers}: nothing is recomputed" in part.notes[-1]


@pytest.mark.parametrize(
    ("system", "file", "named"),
    [
        (
            "torchtune",
            "fsdp_cpu_offload: true, fsdp_reshard_after_forward: false, compile: {model: true}",
            ["fsdp_cpu_offload", "fsdp_reshard_after_forward", "compile"],
        ),
        (
            "torchtune",
            "fsdp_cpu_offload: false, fsdp_reshard_after_forward: true, compile: false, b: 2",
            [],
        ),
        (
            "torchtune",
            "model: {use_recompute: 1}, datasets: [{offload_to: disk}]",
            ["model.use_recompute", "datasets.0.offload_to"],
        ),
        (
            "torchtitan",
            "job: {}, parallelism: {fsdp_reshard_after_forward: never}, checkpoint: {enable: true}",
            ["the", "parallelism.fsdp_reshard_after_forward"],
        ),
        (
            "deepspeed",
            "activation_checkpointing: {}, zero_optimization: {offload_param: {device: cpu}, "
            "offload_optimizer: {device: none}}",
            ["zero_optimization.offload_param"],
        ),
        (
            "oslo",
            "activation_checkpointing: {}, data_parallelism: {zero3: {cpu_offload: true, "
            "reshard_after_forward: true, precompute_scale: true}}",
            ["data_parallelism.zero3.cpu_offload"],
        ),
        (
            "deepspeed",
            'activation_checkpointing: {}, "a\\nb": {offload%s: 1}' % ("x" * 120),
            ["'a\\nb.offload"],
        ),
    ],
)
def test_each_key_elsewhere_that_concerns_memory_is_named(
    system: str, file: str, named: list[str]
) -> None:
    notes = translated(yaml.safe_load(f"{{{file}}}"), system).notes
    notes = tuple(note for note in notes if "needs a stage of" not in note)
    assert [note.split()[1][: len(name)] for note, name in zip(notes, named, strict=True)] == named
    assert all("\n" not in note and len(note) < 400 for note in notes)


def test_a_file_of_nothing_but_such_keys_is_cut_short() -> None:
    many = {f"offload_{number}": 1 for number in range(1000)}
    notes = translated({"activation_checkpointing": {}, **many}, "deepspeed").notes
    assert len(notes) == 21 and notes[-1] == "deepspeed: and 980 more keys are not translated"


# The system, its config, the tensor-parallel size, and what the error says
REFUSED: list[tuple[str, str, int | None, str]] = [
    ("torchtune", "ac_mode: selectiv", None, "ac_mode must be one of none, full, selective (got"),
    ("torchtune", "enable_ac: true", None, "unknown key 'enable_ac' (known: enable_activation"),
    ("torchtune", "ac_mode: selective", None, "ac_option of selective must be 'op', or it must be"),
    ("torchtune", "ac_mode: selective, ac_option: 0", None, "(got 0)"),
    ("torchtune", "ac_option: true", None, "ac_option must be int or str or null (got True)"),
    ("torchtune", f"{ENABLE}, ac_mode: none", None, "contradict each other"),
    (
        "torchtune",
        "ac_mode: full, enable_activation_offloading: true",
        None,
        "needs enable_activation_checkpointing true",
    ),
    ("torchtune", "ac_mode: '${ac_mode}'", None, "ac_mode refers to itself"),
    ("torchtune", "ac_mode: '${oc.env:MODE}'", None, "which only the original resolves: write"),
    ("torchtitan", "mode: ful", None, "mode must be one of none, full, selective, memory_budget"),
    ("torchtitan", "mode: memory_budget, memory_budget: .nan", None, "(got nan)"),
    ("torchtitan", f"selective_ac_option: '{'9' * 5000}'", None, "must be 'op', or it must be"),
    ("torchtitan", "selective_ac_option: '٣'", None, "must be 'op', or it must be"),
    ("modalities", "layers_fqn: h", None, "so nothing is said of recomputation"),
    ("modalities", "ac_variant: full", None, "must be one of full_activation_checkpointing, sel"),
    ("modalities", LAYER + "{save_ops_keys: []}", None, "unknown key 'save_ops_keys'"),
    ("modalities", LAYER + "{}", None, "ac_freq must be from 1"),
    ("modalities", OP + "{save_ops_keys: []}", None, "save_ops_keys must be one of"),
    ("modalities", OP + "{save_ops_keys: [ops.aten.addmm.default]}", None, "ops.aten.addmm"),
    (
        "modalities",
        "ac_variant: full_activation_checkpointing, layers_fqn: h..0",
        None,
        "layers_fqn must be a name",
    ),
    ("modalities", f"{CLASSES}: [CausalSelfAttention]", None, "is no class of a whole layer"),
    ("modalities", f"{CLASSES}: GPT2Block", None, "must be list or null (got 'GPT2Block')"),
    # as its own docs once spelled it
    ("deepspeed", "partitioned_activations: true", 2, "unknown key 'partitioned_activations'"),
    ("deepspeed", "contiguous_memory_optimization: true", 2, "needs partition_activations true"),
    ("deepspeed", "partition_activations: true", 1, "needs a tensor-parallel size > 1 (got 1)"),
    ("deepspeed", "partition_activations: true", None, "(got none): give --tp N"),
    ("oslo", "enable: true}, tensor_parallel_size: 4, a: {", 2, "sizes contradict each other"),
    ("oslo", "enable: true}, tensor_parallel_size: true, a: {", None, "at least 1 (got True)"),
    (
        "oslo",
        "enable: true}, tensor_parallel_size: 4, tensor_parallelism: {parallel_size: 2",
        None,
        "sizes contradict each other",
    ),
    ("oslo", "enable: true, contiguous_checkpointing: true", 2, "needs partitioned_checkpointing"),
]


@pytest.mark.parametrize(("system", "part", "tp_size", "message"), REFUSED)
def test_what_they_refuse_and_what_they_would_misread_is_an_error(
    system: str, part: str, tp_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        of(system, part, tp_size)
    text = str(raised.value)
    assert message in text and "\n" not in text and len(text) < 600


@pytest.mark.parametrize(
    ("system", "text", "message"),
    [
        ("torchtune", "[]", "torchtune: expected an object"),
        ("torchtitan", "mode: full", "there is no section activation_checkpoint"),
        ("torchtitan", "activation_checkpoint: {mode: memory_budget}", "compile"),
        ("modalities", "{}", "there is no component activation_checkpointed, and no ac_variant"),
        ("deepspeed", "activation_checkpointing: null", "expected an object, got None"),
    ],
)
def test_a_file_of_another_shape_is_an_error(system: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        translated(yaml.safe_load(text), system)


def _words() -> st.SearchStrategy[Any]:
    """Any JSON, rich in the words and types that the presets look for."""
    known = yaml.safe_load(
        """
        [activation_checkpoint, activation_checkpointing, enable, ac_mode, ac_option, mode,
        selective_ac_option, compile, memory_budget, ac_variant, ac_fun_params, save_ops_keys,
        ac_freq, partition_activations, cpu_checkpointing, contiguous_memory_optimization,
        partitioned_checkpointing, number_checkpoints, layers_fqn, component_key, variant_key,
        config, model, instance_key, app_state, block_names, n_layer, custom_sharded_layers,
        gradient_checkpointing, gradient_checkpointing_kwargs, every_n_layers, offload,
        training, job, fsdp, activation_checkpointed, tensor_parallel_size, settings,
        activation_checkpointing_modules, model_parallelism, "${mode}", full, selective, op, none,
        "2"]
        """
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
def test_any_json_is_translated_or_refused(system: str, config: Any) -> None:
    """And what is translated says the same as text, also after a shell has split it."""
    try:
        translation = translated(config, system, 2 if system in PARTITIONING else None)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    words = shlex.split(shlex.join(translation.flags))
    if not translation.rules:
        assert 0.0 <= float(words[2]) <= 1.0
        return
    assert parse_policy(words[1]) == translation.policy
    assert all("\n" not in note for note in translation.notes)
    assert check_policy_reaches(translation.for_layers(3).policy, [3]) == []
