"""The rules of `--torch-compile` and `--activation-memory-budget`.

Alone, --torch-compile compiles the norms, activations, rotary embedding and dropout of every
layout, and the recompute policy decides what is kept. With a budget, it compiles each layer as a
whole, and the compiler decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lite.config.checks import flag
from megatron_lite.config.policy import LayerAction

if TYPE_CHECKING:
    from megatron_lite.config.run import RunConfig


def check_compiler(config: RunConfig) -> None:
    """Raises ValueError for settings that do not go with --torch-compile."""
    budget = config.recompute.activation_memory_budget
    if not config.training.torch_compile:
        if budget is not None:
            raise ValueError(
                f"--activation-memory-budget {budget} is a setting of torch's compiler: give "
                "--torch-compile too"
            )
        return
    if config.model.norm_impl == "apex":
        raise ValueError(
            "--norm-impl apex cannot go with --torch-compile, which compiles norms of its own. "
            "Leave one of them out"
        )
    if config.logging.log_peak_memory:
        raise ValueError(
            "--log-peak-memory has no prediction to compare with under --torch-compile: the "
            "temporaries of compiled code are not known. Leave one of them out"
        )
    if budget is not None:
        _check_compiled_layers(config)


def _check_compiled_layers(config: RunConfig) -> None:
    """Raises ValueError for settings that the compiler of whole layers decides."""
    flags = "--torch-compile --activation-memory-budget"
    if config.recompute.recompute_verify:
        raise ValueError(
            f"--recompute-verify has nothing to compare under {flags}, whose compiled "
            "layers decide themselves what they keep and recompute: leave one of them out"
        )
    if config.recompute.is_to_be_chosen or any(
        rule.action != LayerAction() or rule.store != "device"
        for rule in config.recompute.policy.rules
    ):
        raise ValueError(
            "--activation-memory-budget lets the compiler decide what layers recompute: give "
            "it instead of a recompute policy, or leave it out. --torch-compile without it "
            "goes with every policy"
        )
    for axis in ("tensor_model_parallel_size", "context_parallel_size"):
        if (size := getattr(config.parallel, axis)) > 1:
            raise ValueError(
                f"--activation-memory-budget needs {flag(axis)} 1 (got {size}): every "
                "collective would end a graph of a compiled layer. Leave it out: "
                "--torch-compile alone goes with every layout"
            )
    if config.data_parallel.overlap_param_gather:
        raise ValueError(
            "--overlap-param-gather cannot go with --activation-memory-budget: each module's "
            "wait for its weights would end a compiled graph. Leave one of them out"
        )
