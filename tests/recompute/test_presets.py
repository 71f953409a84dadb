"""Other systems' configs as recompute policies: which layers, which operators, which refusals."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import parse_policy
from megatron_lite.recompute import presets
from megatron_lite.recompute.presets import (
    Translation,
    from_deepspeed,
    from_modalities,
    from_oslo,
    from_torchtitan,
    from_torchtune,
)
from megatron_lite.recompute.schedule import segments

OPS = "*:ops(matmul/2,attention,collective,max)"
VARIANT = "selective_{}_activation_checkpointing"


def titan(**section: object) -> Translation:
    return from_torchtitan({"activation_checkpoint": section})


def budget(ratio: float, *, enable: bool = True) -> Translation:
    return from_torchtitan({"activation_checkpoint": {"mode": "memory_budget", "memory_budget": ratio},
                            "compile": {"enable": enable, "components": ["model"]}})


def modalities(variant: str, **parameters: object) -> Translation:
    return from_modalities({"ac_variant": variant, "layers_fqn": "transformer.h", "ac_fun_params": parameters})


def deepspeed(tp_size: int = 2, **section: object) -> Translation:
    return from_deepspeed({"activation_checkpointing": section, "train_batch_size": 8}, tp_size=tp_size)


def oslo(tp_size: int = 2, **section: object) -> Translation:
    return from_oslo({"activation_checkpointing": {"enable": True, **section}}, tp_size=tp_size)


EVERY_NTH: dict[str, Callable[[int], Translation]] = {
    "torchtune": lambda n: from_torchtune({"ac_mode": "selective", "ac_option": n}),
    "torchtune, text": lambda n: from_torchtune({"ac_mode": "selective", "ac_option": str(n)}),
    "torchtitan": lambda n: titan(selective_ac_option=str(n)),
    "modalities": lambda n: modalities(VARIANT.format("layer"), ac_freq=n),
}


@pytest.mark.parametrize("system", EVERY_NTH)
def test_every_nth_layer_is_the_one_that_their_counter_reaches(system: str) -> None:
    """They add one per layer, then rebuild the layer if n divides the count. Here that holds for every model, not the first."""
    for num_layers in range(1, 9):
        for step in range(1, num_layers + 1):
            policy = EVERY_NTH[system](step).policy
            for _ in range(2):
                units = [segment.unit for segment in segments(policy, num_layers)]
                assert units == [count % step == 0 for count in range(1, num_layers + 1)]


def test_a_step_beyond_the_layers_rebuilds_none() -> None:
    assert not any(segment.unit for segment in segments(titan(selective_ac_option="7").policy, 6))


@pytest.mark.parametrize(("translation", "policy"), [
    (from_torchtune({}), "*:none"),
    (from_torchtune({"enable_activation_checkpointing": True}), "*:full"),
    (from_torchtune({"enable_activation_checkpointing": False, "ac_mode": "none", "ac_option": None}), "*:none"),
    (from_torchtune({"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": 2}), "every-2+1:full"),
    (from_torchtune({"enable_activation_checkpointing": True, "ac_mode": "full", "enable_activation_offloading": True}),
     "*:full@host"),
    (from_torchtune({"ac_mode": "selective", "ac_option": "op"}), OPS),
    (from_torchtune({"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": "2",
                     "enable_activation_offloading": True}), "every-2+1:full@host; *:none@host"),
    (from_torchtune({"enable_activation_checkpointing": True, "ac_mode": "selective", "ac_option": "op",
                     "enable_activation_offloading": True}), OPS + "@host"),
    (titan(), "every-2+1:full"),  # the defaults of torchtitan
    (titan(mode="none"), "*:none"), (titan(mode="full"), "*:full"), (titan(selective_ac_option=3), "every-3+2:full"),
    (titan(selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=["moe.router.gate"]), OPS),
    (from_modalities({"ac_variant": "full_activation_checkpointing"}), "*:full"),
    (modalities("full_activation_checkpointing"), "*:full"),
    (modalities(VARIANT.format("op"), save_ops_keys=["ops.aten.max.default", "ops.aten.mm.default"]), "*:ops(matmul/2,max)"),
    (modalities(VARIANT.format("op"), save_ops_keys=list(presets.OPERATORS)), OPS),
    (deepspeed(), "*:full"), (deepspeed(cpu_checkpointing=True), "*:full@host"),
    (deepspeed(partition_activations=True), "*:full@split"),
    (deepspeed(partition_activations=True, cpu_checkpointing=True), "*:full@split+host"),
    (from_oslo({"activation_checkpointing": {}}, tp_size=1), "*:none"), (oslo(1), "*:full"),
    (oslo(partitioned_checkpointing=True, cpu_checkpointing=True), "*:full@split+host"),
])
def test_the_policy(translation: Translation, policy: str) -> None:
    assert translation.policy == parse_policy(policy) and translation.flags == ("--recompute-policy", policy)


@pytest.mark.parametrize("translation", [deepspeed(partition_activations=True, contiguous_memory_optimization=True),
                                         oslo(partitioned_checkpointing=True, contiguous_checkpointing=True)])
def test_contiguous_memory_is_a_flag_beside_the_policy(translation: Translation) -> None:
    assert translation.contiguous_saved_activations
    assert translation.flags == ("--recompute-policy", "*:full@split", "--contiguous-saved-activations")


def test_a_memory_budget_is_the_compilers() -> None:
    assert budget(0.25).flags == ("--torch-compile", "--activation-memory-budget", "0.25")
    assert str(budget(1).policy) == "*:none"  # it excludes any other


@pytest.mark.parametrize(("translation", "keys"), [
    (deepspeed(number_checkpoints=24, profile=True, synchronize_checkpoint_boundary=True),
     ["number_checkpoints", "synchronize_checkpoint_boundary", "profile"]),
    (deepspeed(number_checkpoints=None, profile=False), []),
    (titan(early_stop=True, preserve_rng_state=False, determinism_check="throw", debug=True),
     ["early_stop", "determinism_check", "debug"]),
    (titan(mode="full", memory_budget=0.5), ["memory_budget"]),
    (modalities("full_activation_checkpointing"), ["layers_fqn"]),
    (from_torchtune({"ac_mode": "full", "ac_option": 2}), ["ac_option"]),
    (from_oslo({"activation_checkpointing": {"cpu_checkpointing": True}}, tp_size=1), ["cpu_checkpointing"]),
])
def test_a_value_that_changes_nothing_is_noted(translation: Translation, keys: list[str]) -> None:
    assert [note.split()[1] for note in translation.notes] == keys


@pytest.mark.parametrize(("translate", "message"), [
    (lambda: from_torchtune({"ac_mode": "selectiv"}), "ac_mode must be none, full or selective (got 'selectiv')"),
    (lambda: from_torchtune({"ac_mode": "selective"}), "ac_option of selective must be 'op' or a number of layers (got None)"),
    (lambda: from_torchtune({"ac_mode": "selective", "ac_option": "all"}), "(got 'all')"),
    (lambda: from_torchtune({"ac_mode": "selective", "ac_option": 0}), "ac_option must be from 1, which is every layer"),
    (lambda: from_torchtune({"ac_mode": "selective", "ac_option": -2}), "(got -2)"),
    (lambda: from_torchtune({"ac_mode": "selective", "ac_option": True}), "ac_option must be int or str or null (got True)"),
    (lambda: from_torchtune({"enable_activation_checkpointing": "true"}), "must be bool (got 'true')"),
    (lambda: from_torchtune({"enable_activation_checkpointing": True, "ac_mode": "none"}), "contradict each other"),
    (lambda: from_torchtune({"enable_activation_offloading": True}), "needs enable_activation_checkpointing true"),
    (lambda: from_torchtune({"ac_mode": "full", "enable_activation_offloading": True}), "needs enable_activation_checkpointing"),
    (lambda: from_torchtune({"enable_ac": True}), "unknown key 'enable_ac' (known: enable_activation_checkpointing, ac_mode"),
    (lambda: from_torchtune([]), "torchtune: expected an object"),  # type: ignore[arg-type]
    (lambda: from_torchtitan({"mode": "full"}), "there is no section activation_checkpoint"),
    (lambda: titan(mode="ful"), "mode must be none, full, selective or memory_budget (got 'ful')"),
    (lambda: titan(mode="memory_budget", memory_budget=0.5), "needs the table compile with enable true"),
    (lambda: budget(0.5, enable=False), "needs the table compile with enable true"),
    (lambda: budget(1.5), "memory_budget must be from 0 to 1 (got 1.5)"), (lambda: budget(float("nan")), "(got nan)"),
    (lambda: budget(True), "memory_budget must be int or float (got True)"),
    (lambda: titan(selective_ac_option="two"), "selective_ac_option of selective must be 'op' or a number"),
    (lambda: titan(selective_ac_option="0"), "must be from 1, which is every layer, to 999999 (got 0)"),
    (lambda: titan(selective_ac_option="9" * 5000), "must be 'op' or a number of layers"),
    (lambda: titan(selective_ac_option=1000000), "to 999999"),
    (lambda: titan(selective_ac_option="٣"), "must be 'op' or a number of layers"),
    (lambda: titan(selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=["mlp.w1"]), "not their shapes"),
    (lambda: from_modalities({}), "ac_variant must be one of full_activation_checkpointing"),
    (lambda: modalities("full"), "ac_variant must be one of full_activation_checkpointing, selective_layer_activation_check"),
    (lambda: modalities("full_activation_checkpointing", ac_freq=2), "unknown key 'ac_freq' (known: none)"),
    (lambda: modalities(VARIANT.format("layer")), "ac_freq must be from 1"),
    (lambda: modalities(VARIANT.format("layer"), ac_freq=0), "ac_freq must be from 1"),
    (lambda: modalities(VARIANT.format("layer"), ac_freq="2"), "ac_freq must be int (got '2')"),
    (lambda: modalities(VARIANT.format("op")), "save_ops_keys is empty"),
    (lambda: modalities(VARIANT.format("op"), save_ops_keys=[]), "save_ops_keys is empty"),
    (lambda: modalities(VARIANT.format("op"), save_ops_keys=["ops.aten.addmm.default"]), "(got ['ops.aten.addmm.default'])"),
    (lambda: modalities(VARIANT.format("op"), save_ops_keys=[[]]), "save_ops_keys must be among"),
    (lambda: from_modalities({"ac_variant": "full_activation_checkpointing", "layers_fqn": "h..0"}), "layers_fqn must be a name"),
    (lambda: from_deepspeed({"train_batch_size": 8}, tp_size=2), "there is no section activation_checkpointing"),
    (lambda: from_deepspeed({"activation_checkpointing": None}, tp_size=2), "expected an object, got None"),
    (lambda: deepspeed(partitioned_activations=True), "unknown key 'partitioned_activations'"),  # as its own docs once spelled it
    (lambda: deepspeed(partition_activations=1), "partition_activations must be bool (got 1)"),
    (lambda: deepspeed(number_checkpoints=0), "number_checkpoints must be at least 1 or null (got 0)"),
    (lambda: deepspeed(number_checkpoints=True), "number_checkpoints must be int or null (got True)"),
    (lambda: deepspeed(contiguous_memory_optimization=True), "contiguous_memory_optimization needs partition_activations true"),
    (lambda: deepspeed(contiguous_memory_optimization=True, cpu_checkpointing=True), "needs partition_activations true"),
    (lambda: deepspeed(1, partition_activations=True), "partition_activations needs a tensor-parallel size > 1 (got 1)"),
    (lambda: deepspeed(0), "must be at least 1 (got 0)"),
    (lambda: oslo(contiguous_checkpointing=True), "contiguous_checkpointing needs partitioned_checkpointing true"),
    (lambda: oslo(1, partitioned_checkpointing=True), "partitioned_checkpointing needs a tensor-parallel size > 1 (got 1)"),
    (lambda: oslo(partition_activations=True), "unknown key 'partition_activations'"),
])
def test_what_they_refuse_and_what_they_would_misread_is_an_error(translate: Callable[[], Translation], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        translate()
    text = str(raised.value)
    assert message in text and "\n" not in text and len(text) < 600


def _words() -> st.SearchStrategy[Any]:
    """Any JSON, rich in the words and types that the presets look for."""
    known = ["activation_checkpoint", "activation_checkpointing", "enable", "ac_mode", "ac_option", "mode", "selective_ac_option",
             "compile", "memory_budget", "ac_variant", "ac_fun_params", "save_ops_keys", "ac_freq", "partition_activations",
             "cpu_checkpointing", "contiguous_memory_optimization", "partitioned_checkpointing", "number_checkpoints",
             "layers_fqn", "full", "selective", "op", "none", "2", *presets.VARIANTS, *presets.OPERATORS]
    words = st.one_of(st.sampled_from(known), st.text(max_size=4))
    leaves = st.one_of(words, st.booleans(), st.none(), st.integers(), st.floats())
    return st.recursive(leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
                        max_leaves=12)


@pytest.mark.parametrize("preset", [from_torchtune, from_torchtitan, from_modalities, partial(from_deepspeed, tp_size=2),
                                    partial(from_oslo, tp_size=2)])
@given(config=_words())
def test_any_json_is_translated_or_refused(preset: Callable[[Any], Translation], config: Any) -> None:
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
    assert words[2:] == ["--contiguous-saved-activations"] * translation.contiguous_saved_activations
