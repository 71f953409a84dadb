"""Makes what Megatron-LM's checkpoints hold besides tensors: arguments, progress and groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.model import SWITCHED_ACTIVATIONS
from megatron_lite.convert.megatron.checkpoint_args import NOT_TAKEN, ONLY_HERE
from megatron_lite.convert.megatron.parameter_names import LAYER_NUMBER
from megatron_lite.convert.weight_formats import Described
from megatron_lite.parallel.parameter_spec import ParameterSpec

VOCAB_MULTIPLE = 128  # --make-vocab-size-divisible-by, its default in Megatron-LM
VERSION = 3.0
EXTRA_STATE = "_extra_state"
# The modules of a layer that have an `_extra_state`, which is empty without FP8.
LINEARS = (
    *("self_attention.linear_qkv", "self_attention.linear_proj"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
# The order of a layer's modules in Megatron-LM, which numbers the optimizer states.
ORDER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
# Of Megatron's schedule of the learning rate. The run that loads it takes its own values with
# --override-opt_param-scheduler.
SCHEDULE = (
    *("max_lr", "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd"),
    *("end_wd", "wd_incr_style", "wd_incr_steps"),
)


def padded_vocab_size(described: Described, tp_size: int) -> int:
    """Returns the number of rows of the vocabulary that a run of Megatron-LM has by default."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-described.true_vocab_size // multiple) * multiple


def namespace(described: Described, *, tp_size: int, pp_size: int) -> argparse.Namespace:
    """Returns the `args` of a run of Megatron-LM with the model, as numbers, texts and lists."""
    model = described.model
    values: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(model).items()
        if name not in NOT_TAKEN and name not in ONLY_HERE
    }
    if not model.group_query_attention:
        values["num_query_groups"] = model.num_attention_heads
    return argparse.Namespace(
        **values,
        seq_length=model.max_position_embeddings,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=None,
        num_experts=None,
        tokenizer_type="NullTokenizer",
        vocab_size=described.true_vocab_size - 1,
        padded_vocab_size=padded_vocab_size(described, tp_size),
        make_vocab_size_divisible_by=VOCAB_MULTIPLE,
        consumed_train_samples=iteration_and_samples(described)[1],
        consumed_valid_samples=0,
    )


def iteration_and_samples(described: Described) -> tuple[int, int]:
    """Returns the progress to write: zero without optimizer states, since training starts anew."""
    progress = described.progress
    if progress is None or not described.state_keys:
        return 0, 0
    return progress.iteration, progress.consumed_samples


def newest(described: Described) -> str:
    """Returns what the pointer names: the iteration, or "release" for weights alone."""
    return str(iteration_and_samples(described)[0]) if described.state_keys else "release"


def folder_of(newest: str) -> str:
    """Returns the name of the folder that the pointer names."""
    return newest if newest == "release" else f"iter_{int(newest):07d}"


def common_values(described: Described, *, tp_size: int, pp_size: int) -> dict[str, Any]:
    """Returns the values that are no tensors and belong to no optimizer."""
    iteration, samples = iteration_and_samples(described)
    values: dict[str, Any] = {
        "args": namespace(described, tp_size=tp_size, pp_size=pp_size),
        "checkpoint_version": VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
    }
    if described.state_keys:
        values["opt_param_scheduler"] = {**dict.fromkeys(SCHEDULE), "num_steps": samples}
    return values


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the names of a model's parameters in the order of Megatron-LM's modules."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, int, int]:
    found = LAYER_NUMBER.fullmatch(name)
    if found is None:
        return (0 if name.startswith("embedding.") else 2, 0, 0)
    module, _, part = found[2].rpartition(".")
    # In each module the weight comes before the bias.
    return 1, int(found[1]), 2 * ORDER.index(module) + (part == "bias")


def has_decay(name: str, spec: ParameterSpec) -> bool:
    """Returns whether Megatron's optimizer decays a parameter."""
    return not (name.endswith(".bias") or len(spec.global_shape) == 1)


def groups() -> list[dict[str, Any]]:
    """Returns the optimizer's groups with and without weight decay, without `params`."""
    return [
        {
            "wd_mult": decay,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": None,
            "min_lr": None,
        }
        for decay in (1.0, 0.0)
    ]


def check_exact(described: Described, target: str) -> None:
    """Raises InputError unless Megatron-LM has such a model, and reads the optimizer states."""
    for name, only in ONLY_HERE.items():
        value = getattr(described.model, name)
        if value != only:
            raise InputError(
                f"--to {target}: the model has {name} = {value}, and every model of Megatron-LM "
                f"has {only}: convert with --to hf"
            )
    model = described.model
    has_gelu = not any(getattr(model, name) for name in SWITCHED_ACTIVATIONS)
    if has_gelu and model.bias_gelu_fusion and not model.add_bias_linear:
        # Megatron-LM turns its fused GELU off without a bias, and the unfused one has no tanh.
        raise InputError(
            f"--to {target}: the model has bias_gelu_fusion = True, the tanh formula of GELU, "
            "without biases, and Megatron-LM computes the exact GELU there: train with "
            "--no-bias-gelu-fusion"
        )
    others = set(described.state_keys) - {"exp_avg", "exp_avg_sq", "master"}
    if others or (described.state_keys and "exp_avg_sq" not in described.state_keys):
        raise InputError(
            f"--to {target}: the checkpoint holds the optimizer states "
            f"{', '.join(described.state_keys)}, and only those of Adam can be converted. "
            "Export the weights alone with --to hf, or train with --optimizer adam"
        )
