"""Other systems' configs as recompute policies: which layers, which operators, which refusals."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import check_policy_reaches, parse_policy
from megatron_lite.recompute.recompute_plan import segments
from megatron_lite.tools.modalities import VARIANTS, from_modalities
from megatron_lite.tools.translation import OPERATORS, Translation
from megatron_lite.tools.translators import (
    from_deepspeed,
    from_oslo,
    from_torchtitan,
    from_torchtune,
)

OPS = "*:ops(matmul/2,attention,collective,max)"
VARIANT = "selective_{}_activation_checkpointing"


def titan(**section: object) -> Translation:
    return from_torchtitan({"activation_checkpoint": section})


def budget(ratio: float, *, enable: bool = True) -> Translation:
    return from_torchtitan(
        {
            "activation_checkpoint": {"mode": "memory_budget", "memory_budget": ratio},
            "compile": {"enable": enable, "components": ["model"]},
        }
    )


def modalities(variant: str, **parameters: object) -> Translation:
    return from_modalities(
        {"ac_variant": variant, "layers_fqn": "transformer.h", "ac_fun_params": parameters}
    )


def deepspeed(tp_size: int = 2, **section: object) -> Translation:
    return from_deepspeed(
        {"activation_checkpointing": section, "train_batch_size": 8}, tp_size=tp_size
    )


def oslo(tp_size: int = 2, **section: object) -> Translation:
    return from_oslo({"activation_checkpointing": {"enable": True, **section}}, tp_size=tp_size)


def with_size(tp_size: int | None, in_file: object, **more: object) -> Translation:
    return from_oslo(
        {
            "activation_checkpointing": {"enable": True, "partitioned_checkpointing": True},
            "model_parallelism": {"enable": True, "tensor_parallel_size": in_file},
            **more,
        },
        tp_size=tp_size,
    )


def fsdp1(classes: object) -> Translation:
    return from_modalities(
        {
            "activation_checkpointing_modules": classes,
            "model": {"instance_key": "wrapped_model", "pass_type": "BY_REFERENCE"},
        }
    )


EVERY_NTH: dict[str, Callable[[int], Translation]] = {
    "torchtune": lambda n: from_torchtune({"ac_mode": "selective", "ac_option": n}),
    "torchtune, text": lambda n: from_torchtune({"ac_mode": "selective", "ac_option": str(n)}),
    "torchtitan": lambda n: titan(selective_ac_option=str(n)),
    "modalities": lambda n: modalities(VARIANT.format("layer"), ac_freq=n),
}


@pytest.mark.parametrize("system", EVERY_NTH)
def test_every_nth_layer_is_the_one_that_their_counter_reaches(system: str) -> None:
    """They add one per layer, then rebuild the layer if n divides the count. Here that holds for
    every model, not the first."""
    for num_layers in range(1, 9):
        for step in range(1, num_layers + 1):
            policy = EVERY_NTH[system](step).policy
            for _ in range(2):
                units = [segment.unit for segment in segments(policy, num_layers)]
                assert units == [count % step == 0 for count in range(1, num_layers + 1)]


def test_a_step_beyond_the_layers_rebuilds_none() -> None:
    assert not any(segment.unit for segment in segments(titan(selective_ac_option="7").policy, 6))


@pytest.mark.parametrize(
    ("translation", "policy"),
    [
        (from_torchtune({}), "*:none"),
        (from_torchtune({"enable_activation_checkpointing": True}), "*:full"),
        (
            from_torchtune(
                {"enable_activation_checkpointing": False, "ac_mode": "none", "ac_option": None}
            ),
            "*:none",
        ),
        (
            from_torchtune(
                {"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": 2}
            ),
            "every-2+1:full",
        ),
        (
            from_torchtune(
                {
                    "enable_activation_checkpointing": True,
                    "ac_mode": "full",
                    "enable_activation_offloading": True,
                }
            ),
            "*:full@host",
        ),
        (from_torchtune({"ac_mode": "selective", "ac_option": "op"}), OPS),
        (
            from_torchtune(
                {
                    "enable_activation_checkpointing": True,
                    "ac_mode": "selective",
                    "ac_option": "2",
                    "enable_activation_offloading": True,
                }
            ),
            "every-2+1:full@host; *:none@host",
        ),
        (
            from_torchtune(
                {
                    "enable_activation_checkpointing": True,
                    "ac_mode": "selective",
                    "ac_option": "op",
                    "enable_activation_offloading": True,
                }
            ),
            OPS + "@host",
        ),
        (titan(), "every-2+1:full"),  # the defaults of torchtitan
        (titan(mode="none"), "*:none"),
        (titan(mode="full"), "*:full"),
        (titan(selective_ac_option=3), "every-3+2:full"),
        (
            titan(
                selective_ac_option="op",
                per_op_sac_force_recompute_mm_shapes_by_fqns=["moe.router.gate"],
            ),
            OPS,
        ),
        (from_modalities({"ac_variant": "full_activation_checkpointing"}), "*:full"),
        (modalities("full_activation_checkpointing"), "*:full"),
        (
            modalities(
                VARIANT.format("op"), save_ops_keys=["ops.aten.max.default", "ops.aten.mm.default"]
            ),
            "*:ops(matmul/2,max)",
        ),
        (modalities(VARIANT.format("op"), save_ops_keys=list(OPERATORS)), OPS),
        (deepspeed(), "*:full"),
        (deepspeed(cpu_checkpointing=True), "*:full@host"),
        (deepspeed(partition_activations=True), "*:full@split"),
        (deepspeed(partition_activations=True, cpu_checkpointing=True), "*:full@split+host"),
        (fsdp1(["GPT2Block"]), "*:full"),
        (fsdp1([]), "*:none"),
        (fsdp1(None), "*:none"),
        (fsdp1(["TransformerMLP"]), "*:mlp"),
        (fsdp1(["SwiGLU", "LlamaDecoderLayer"]), "*:full"),
        (
            from_modalities(
                {"sac_variant": VARIANT.format("layer"), "sac_fun_params": {"ac_freq": 2}}
            ),
            "every-2+1:full",
        ),
        (from_oslo({"activation_checkpointing": {}}, tp_size=1), "*:none"),
        (oslo(1), "*:full"),
        (oslo(partitioned_checkpointing=True, cpu_checkpointing=True), "*:full@split+host"),
    ],
)
def test_the_policy(translation: Translation, policy: str) -> None:
    assert translation.policy == parse_policy(policy) and translation.flags == (
        "--recompute-policy",
        policy,
    )


@pytest.mark.parametrize(
    "translation",
    [
        deepspeed(partition_activations=True, contiguous_memory_optimization=True),
        oslo(partitioned_checkpointing=True, contiguous_checkpointing=True),
    ],
)
def test_contiguous_memory_is_a_flag_beside_the_policy(translation: Translation) -> None:
    assert translation.contiguous_saved_activations
    assert translation.flags == (
        "--recompute-policy",
        "*:full@split",
        "--contiguous-saved-activations",
    )


@pytest.mark.parametrize(
    ("where", "size"),
    [
        (
            {
                "model_parallelism": {
                    "enable": True,
                    "tensor_parallel_size": 4,
                    "pipeline_parallel_size": 1,
                }
            },
            4,
        ),
        ({"model_parallelism": {"tensor_parallel_size": 2, "tensor_parallel_mode": "1d"}}, 2),
        ({"tensor_parallelism": {"enable": True, "parallel_size": 8, "parallel_mode": "1d"}}, 8),
        ({"tensor_parallel_size": 4}, 4),
    ],
)
def test_oslo_says_the_tensor_parallel_size_in_its_own_file(
    where: dict[str, Any], size: int
) -> None:
    file = {
        **where,
        "activation_checkpointing": {"enable": True, "partitioned_checkpointing": True},
    }
    assert from_oslo(file) == from_oslo(file, tp_size=size)
    assert from_oslo(file).flags == (
        "--recompute-policy",
        "*:full@split",
        "--tensor-model-parallel-size",
        str(size),
    )


def test_the_size_of_a_section_that_is_off_is_none() -> None:
    file = {
        "model_parallelism": {"enable": False, "tensor_parallel_size": 4},
        "activation_checkpointing": {"enable": True, "partitioned_checkpointing": True},
    }
    with pytest.raises(ValueError, match="the file does not say how many there are"):
        from_oslo(file)


def test_deepspeed_says_the_tensor_parallel_size_where_it_shards_the_model_itself() -> None:
    file = {
        "activation_checkpointing": {"partition_activations": True},
        "tensor_parallel": {"autotp_size": 4},
    }
    assert from_deepspeed(file).flags[-2:] == ("--tensor-model-parallel-size", "4")


@pytest.mark.parametrize(
    "keys",
    [
        {"memory_efficient_wrapping": True},
        {"memory_efficient_fsdp_wrap": True},
        {"custom_sharded_layers": ["tok_embeddings", "output"]},
        {"custom_sharded_layers": ["decoder.tok_embeddings", "decoder.output"]},
        {"fsdp": {"memory_efficient_wrapping": True}},
    ],
)
def test_memory_efficient_wrapping_is_a_flag_of_fsdp2(keys: dict[str, Any]) -> None:
    translation = from_torchtune({"enable_activation_checkpointing": True, **keys})
    assert translation.flags == (
        "--recompute-policy",
        "*:full",
        "--use-torch-fsdp2",
        "--fsdp-memory-efficient-wrapping",
    )
    assert translation.notes == ()


@pytest.mark.parametrize(
    ("layers", "wrapped", "notes"),
    [
        ([], False, []),
        (None, False, []),
        (["tok_embeddings"], True, ["has"]),
        (["vision"], False, ["['vision']"]),
        (["output", "fusion", 3], True, ["['fusion',", "has"]),
    ],
)
def test_other_modules_cannot_be_units_of_their_own(
    layers: list[object] | None, wrapped: bool, notes: list[str]
) -> None:
    translation = from_torchtune({"custom_sharded_layers": layers})
    assert translation.fsdp_memory_efficient_wrapping == wrapped
    assert [note.split()[2] for note in translation.notes] == notes


def test_an_interpolation_stands_for_another_value_of_the_file() -> None:
    file = {
        "settings": {"every": "${settings.n}", "n": 3},
        "ac_mode": "selective",
        "ac_option": "${settings.every}",
    }
    assert str(from_torchtune(file).policy) == "every-3+2:full"


@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("num_layers", [1, 2, 4, 9])
def test_for_a_number_of_layers_no_rule_names_nothing(step: int, num_layers: int) -> None:
    """And the layers that remain recompute what they did."""
    for offloaded in (False, True):
        whole = from_torchtune(
            {
                "enable_activation_checkpointing": offloaded,
                "ac_mode": "selective",
                "ac_option": step,
                "enable_activation_offloading": offloaded,
            }
        )
        part = whole.for_layers(num_layers)
        assert check_policy_reaches(part.policy, [num_layers]) == []
        assert [
            part.policy.rule_of(layer) for layer in range(num_layers) if step <= num_layers
        ] == [whole.policy.rule_of(layer) for layer in range(num_layers) if step <= num_layers]
        assert (part == whole) == (num_layers >= whole.layers_needed)
        assert len(part.notes) == len(whole.notes) + (num_layers < step)
        if num_layers < step:
            assert str(part.policy) == ("*:none@host" if offloaded else "*:none")
            assert f"names no layer of {num_layers}: nothing is recomputed" in part.notes[-1]


@pytest.mark.parametrize(
    ("translation", "named"),
    [
        (
            from_torchtune(
                {
                    "fsdp_cpu_offload": True,
                    "fsdp_reshard_after_forward": False,
                    "compile": {"model": True},
                }
            ),
            ["fsdp_cpu_offload", "fsdp_reshard_after_forward", "compile"],
        ),
        (
            from_torchtune(
                {
                    "fsdp_cpu_offload": False,
                    "fsdp_reshard_after_forward": True,
                    "compile": False,
                    "batch_size": 2,
                }
            ),
            [],
        ),
        (
            from_torchtune(
                {
                    "fsdp": {"cpu_offload": True},
                    "model": {"use_recompute": 1},
                    "datasets": [{"offload_to": "disk"}],
                }
            ),
            ["fsdp.cpu_offload", "model.use_recompute", "datasets.0.offload_to"],
        ),
        (
            from_torchtitan(
                {
                    "job": {},
                    "training": {"enable_cpu_offload": True},
                    "compile": {"enable": True},
                    "activation_checkpoint": {},
                    "parallelism": {"fsdp_reshard_after_forward": "never"},
                    "checkpoint": {"enable": True},
                }
            ),
            ["training.enable_cpu_offload", "compile", "parallelism.fsdp_reshard_after_forward"],
        ),
        (
            from_deepspeed(
                {
                    "activation_checkpointing": {},
                    "zero_optimization": {
                        "stage": 3,
                        "offload_param": {"device": "cpu", "pin_memory": True},
                        "offload_optimizer": {"device": "none"},
                    },
                }
            ),
            ["zero_optimization.offload_param"],
        ),
        (
            from_oslo(
                {
                    "activation_checkpointing": {},
                    "kernel_fusion": {"memory_efficient_fusion": True},
                    "data_parallelism": {
                        "zero3": {
                            "cpu_offload": True,
                            "reshard_after_forward": True,
                            "precompute_scale": True,
                        }
                    },
                }
            ),
            ["data_parallelism.zero3.cpu_offload"],
        ),
        (
            from_deepspeed({"activation_checkpointing": {}, "a\nb": {"offload" + "x" * 999: 1}}),
            ["'a\\nb.offload"],
        ),
    ],
)
def test_each_key_elsewhere_that_concerns_memory_is_named(
    translation: Translation, named: list[str]
) -> None:
    assert [
        note.split()[1][: len(name)] for note, name in zip(translation.notes, named, strict=True)
    ] == named
    assert all("\n" not in note and len(note) < 400 for note in translation.notes)


def test_a_file_of_nothing_but_such_keys_is_cut_short() -> None:
    notes = from_deepspeed(
        {"activation_checkpointing": {}, **{f"offload_{number}": 1 for number in range(1000)}}
    ).notes
    assert len(notes) == 21 and notes[-1] == "deepspeed: and 980 more keys are not translated"


def test_a_memory_budget_is_the_compilers() -> None:
    assert budget(0.25).flags == ("--torch-compile", "--activation-memory-budget", "0.25")
    assert str(budget(1).policy) == "*:none"  # it excludes any other


@pytest.mark.parametrize(
    ("translation", "keys"),
    [
        (
            deepspeed(number_checkpoints=24, profile=True, synchronize_checkpoint_boundary=True),
            ["number_checkpoints", "synchronize_checkpoint_boundary", "profile"],
        ),
        (deepspeed(number_checkpoints=None, profile=False), []),
        (
            titan(early_stop=True, preserve_rng_state=False, determinism_check="throw", debug=True),
            ["early_stop", "determinism_check", "debug", "preserve_rng_state"],
        ),
        (titan(mode="full", memory_budget=0.5), ["memory_budget"]),
        (modalities("full_activation_checkpointing"), ["layers_fqn"]),
        (from_torchtune({"ac_mode": "full", "ac_option": 2}), ["ac_option"]),
        (
            from_torchtune(
                {"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": 2}
            ),
            ["ac_mode"],
        ),
        (
            from_oslo({"activation_checkpointing": {"cpu_checkpointing": True}}, tp_size=1),
            ["cpu_checkpointing"],
        ),
    ],
)
def test_a_value_that_changes_nothing_is_noted(translation: Translation, keys: list[str]) -> None:
    assert [note.split()[1] for note in translation.notes] == keys


@pytest.mark.parametrize(
    ("translate", "message"),
    [
        (
            lambda: from_torchtune({"ac_mode": "selectiv"}),
            "ac_mode must be none, full or selective (got 'selectiv')",
        ),
        (
            lambda: from_torchtune({"ac_mode": "selective"}),
            "ac_option of selective must be 'op' or a number of layers (got None)",
        ),
        (lambda: from_torchtune({"ac_mode": "selective", "ac_option": "all"}), "(got 'all')"),
        (
            lambda: from_torchtune({"ac_mode": "selective", "ac_option": 0}),
            "ac_option must be from 1, which is every layer",
        ),
        (lambda: from_torchtune({"ac_mode": "selective", "ac_option": -2}), "(got -2)"),
        (
            lambda: from_torchtune({"ac_mode": "selective", "ac_option": True}),
            "ac_option must be int or str or null (got True)",
        ),
        (
            lambda: from_torchtune({"enable_activation_checkpointing": "true"}),
            "must be bool (got 'true')",
        ),
        (
            lambda: from_torchtune({"enable_activation_checkpointing": True, "ac_mode": "none"}),
            "contradict each other",
        ),
        (
            lambda: from_torchtune({"enable_activation_offloading": True}),
            "needs enable_activation_checkpointing true",
        ),
        (
            lambda: from_torchtune({"ac_mode": "full", "enable_activation_offloading": True}),
            "needs enable_activation_checkpointing",
        ),
        (
            lambda: from_torchtune({"enable_ac": True}),
            "unknown key 'enable_ac' (known: enable_activation_checkpointing, ac_mode",
        ),
        (lambda: from_torchtune([]), "torchtune: expected an object"),  # type: ignore[arg-type]
        (lambda: from_torchtitan({"mode": "full"}), "there is no section activation_checkpoint"),
        (
            lambda: titan(mode="ful"),
            "mode must be none, full, selective or memory_budget (got 'ful')",
        ),
        (
            lambda: titan(mode="memory_budget", memory_budget=0.5),
            "needs the table compile with enable true",
        ),
        (lambda: budget(0.5, enable=False), "needs the table compile with enable true"),
        (lambda: budget(1.5), "memory_budget must be from 0 to 1 (got 1.5)"),
        (lambda: budget(float("nan")), "(got nan)"),
        (lambda: budget(True), "memory_budget must be int or float (got True)"),
        (
            lambda: titan(selective_ac_option="two"),
            "selective_ac_option of selective must be 'op' or a number",
        ),
        (
            lambda: titan(selective_ac_option="0"),
            "must be from 1, which is every layer, to 999999 (got 0)",
        ),
        (lambda: titan(selective_ac_option="9" * 5000), "must be 'op' or a number of layers"),
        (lambda: titan(selective_ac_option=1000000), "to 999999"),
        (lambda: titan(selective_ac_option="٣"), "must be 'op' or a number of layers"),
        (
            lambda: titan(
                selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=["mlp.w1"]
            ),
            "not their shapes",
        ),
        (
            lambda: from_modalities({}),
            "there is no component activation_checkpointed, and no ac_variant",
        ),
        (lambda: from_modalities({"layers_fqn": "h"}), "so nothing is said of recomputation"),
        (lambda: from_modalities({"ac_variant": None}), "ac_variant must be str (got None)"),
        (
            lambda: modalities("full"),
            (
                "ac_variant must be one of full_activation_checkpointing, "
                "selective_layer_activation_check"
            ),
        ),
        (
            lambda: modalities("full_activation_checkpointing", ac_freq=2),
            "unknown key 'ac_freq' (known: none)",
        ),
        (lambda: modalities(VARIANT.format("layer")), "ac_freq must be from 1"),
        (lambda: modalities(VARIANT.format("layer"), ac_freq=0), "ac_freq must be from 1"),
        (lambda: modalities(VARIANT.format("layer"), ac_freq="2"), "ac_freq must be int (got '2')"),
        (lambda: modalities(VARIANT.format("op")), "save_ops_keys is empty"),
        (lambda: modalities(VARIANT.format("op"), save_ops_keys=[]), "save_ops_keys is empty"),
        (
            lambda: modalities(VARIANT.format("op"), save_ops_keys=["ops.aten.addmm.default"]),
            "(got ['ops.aten.addmm.default'])",
        ),
        (
            lambda: modalities(VARIANT.format("op"), save_ops_keys=[[]]),
            "save_ops_keys must be among",
        ),
        (
            lambda: from_modalities(
                {"ac_variant": "full_activation_checkpointing", "layers_fqn": "h..0"}
            ),
            "layers_fqn must be a name",
        ),
        (
            lambda: from_deepspeed({"train_batch_size": 8}, tp_size=2),
            "there is no section activation_checkpointing",
        ),
        (
            lambda: from_deepspeed({"activation_checkpointing": None}, tp_size=2),
            "expected an object, got None",
        ),
        # as its own docs once spelled it
        (lambda: deepspeed(partitioned_activations=True), "unknown key 'partitioned_activations'"),
        (lambda: deepspeed(partition_activations=1), "partition_activations must be bool (got 1)"),
        (
            lambda: deepspeed(number_checkpoints=0),
            "number_checkpoints must be at least 1 or null (got 0)",
        ),
        (
            lambda: deepspeed(number_checkpoints=True),
            "number_checkpoints must be int or null (got True)",
        ),
        (
            lambda: deepspeed(contiguous_memory_optimization=True),
            "contiguous_memory_optimization needs partition_activations true",
        ),
        (
            lambda: deepspeed(contiguous_memory_optimization=True, cpu_checkpointing=True),
            "needs partition_activations true",
        ),
        (
            lambda: deepspeed(1, partition_activations=True),
            "partition_activations needs a tensor-parallel size > 1 (got 1)",
        ),
        (lambda: deepspeed(0), "must be at least 1 (got 0)"),
        (
            lambda: from_deepspeed({"activation_checkpointing": {"partition_activations": True}}),
            (
                "partition_activations splits inputs over tensor-parallel ranks, and the file does "
                "not say how many there are: give --tp N"
            ),
        ),
        (
            lambda: with_size(None, 1),
            "needs a tensor-parallel size > 1 (got 1 in model_parallelism.tensor_parallel_size)",
        ),
        (
            lambda: with_size(2, 4),
            "size 2 contradicts model_parallelism.tensor_parallel_size 4 of the file",
        ),
        (
            lambda: with_size(None, True),
            "model_parallelism.tensor_parallel_size must be a number of ranks from 1 (got True)",
        ),
        (lambda: with_size(None, 0), "must be a number of ranks from 1 (got 0)"),
        (lambda: with_size(None, "4"), "must be a number of ranks from 1 (got '4')"),
        (
            lambda: with_size(None, 4, tensor_parallel_size=2),
            "and model_parallelism.tensor_parallel_size contradict each",
        ),
        (
            lambda: from_torchtune({"custom_sharded_layers": "output"}),
            "custom_sharded_layers must be list or null (got 'output')",
        ),
        (
            lambda: from_torchtune({"memory_efficient_wrapping": 1}),
            "memory_efficient_wrapping must be bool (got 1)",
        ),
        (
            lambda: from_torchtune({"ac_mode": "selective", "ac_option": "${n}"}),
            "ac_option refers to 'n', which the file does not",
        ),
        (lambda: from_torchtune({"ac_mode": "${ac_mode}"}), "ac_mode refers to itself"),
        (
            lambda: from_torchtune({"ac_mode": "${oc.env:MODE}"}),
            "which only the original resolves: write its value into the file",
        ),
        (
            lambda: fsdp1(["CausalSelfAttention"]),
            "'CausalSelfAttention' is no class of a whole layer",
        ),
        (lambda: fsdp1([3]), "3 is no class of a whole layer"),
        (
            lambda: fsdp1("GPT2Block"),
            "activation_checkpointing_modules must be list or null (got 'GPT2Block')",
        ),
        (
            lambda: oslo(contiguous_checkpointing=True),
            "contiguous_checkpointing needs partitioned_checkpointing true",
        ),
        (
            lambda: oslo(1, partitioned_checkpointing=True),
            "partitioned_checkpointing needs a tensor-parallel size > 1 (got 1)",
        ),
        (lambda: oslo(partition_activations=True), "unknown key 'partition_activations'"),
    ],
)
def test_what_they_refuse_and_what_they_would_misread_is_an_error(
    translate: Callable[[], Translation], message: str
) -> None:
    with pytest.raises(ValueError) as raised:
        translate()
    text = str(raised.value)
    assert message in text and "\n" not in text and len(text) < 600


def _words() -> st.SearchStrategy[Any]:
    """Any JSON, rich in the words and types that the presets look for."""
    known = [
        "activation_checkpoint",
        "activation_checkpointing",
        "enable",
        "ac_mode",
        "ac_option",
        "mode",
        "selective_ac_option",
        "compile",
        "memory_budget",
        "ac_variant",
        "ac_fun_params",
        "save_ops_keys",
        "ac_freq",
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
        "partitioned_checkpointing",
        "number_checkpoints",
        "layers_fqn",
        "component_key",
        "variant_key",
        "config",
        "model",
        "instance_key",
        "app_state",
        "block_names",
        "n_layer",
        "custom_sharded_layers",
        "training",
        "job",
        "fsdp",
        "activation_checkpointed",
        "tensor_parallel_size",
        "activation_checkpointing_modules",
        "model_parallelism",
        "${mode}",
        "full",
        "selective",
        "op",
        "none",
        "2",
        *VARIANTS,
        *OPERATORS,
    ]
    words = st.one_of(st.sampled_from(known), st.text(max_size=4))
    leaves = st.one_of(words, st.booleans(), st.none(), st.integers(), st.floats())
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)
        ),
        max_leaves=12,
    )


@pytest.mark.parametrize(
    "preset",
    [
        from_torchtune,
        from_torchtitan,
        from_modalities,
        partial(from_deepspeed, tp_size=2),
        partial(from_oslo, tp_size=2),
    ],
)
@given(config=_words())
def test_any_json_is_translated_or_refused(
    preset: Callable[[Any], Translation], config: Any
) -> None:
    """And what is translated says the same as text, also after a shell has split it."""
    try:
        translation = preset(config)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    words = shlex.split(shlex.join(translation.flags))
    if translation.activation_memory_budget is not None:
        assert 0.0 <= float(words[2]) <= 1.0
        return
    assert parse_policy(words[1]) == translation.policy
    size = translation.tensor_model_parallel_size
    assert words[2:] == (
        ["--contiguous-saved-activations"] * translation.contiguous_saved_activations
        + ["--use-torch-fsdp2", "--fsdp-memory-efficient-wrapping"]
        * translation.fsdp_memory_efficient_wrapping
        + (["--tensor-model-parallel-size", str(size)] if size is not None else [])
    )
    assert all("\n" not in note for note in translation.notes)
    assert check_policy_reaches(translation.for_layers(3).policy, [3]) == []
