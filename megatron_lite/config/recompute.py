"""The configuration of activation recomputation, with the names of Megatron's flags.

recompute/schedule.py derives from it what each layer rebuilds.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .policy import Policy, parse_policy
from .regions import (
    ALIAS,
    CORE_ATTENTION,
    MEGATRON_PARTS,
    MODULES,
    POINTWISE,
    REGIONS,
    SAVED_WITH,
    expanded,
    store_of,
)
from .setting import ContradictionError, Settings, count, setting, several, switch
from .units import parse_bytes

METHODS = ("uniform", "block")
AUTO = "auto"
ELSEWHERE = "recompute_policy recompute_activations recompute_granularity"


class RecomputeConfig(Settings):
    """The choice of activations that backward rebuilds instead of keeping them.

    Without `recompute_granularity` and `recompute_policy` every activation is kept.

    recompute_activations: the same as `--recompute-granularity selective`.
    recompute_method: for granularity full. "uniform" recomputes every layer, in units of
        recompute_num_layers layers. "block" recomputes the first recompute_num_layers layers of
        each stage, each as one unit.
    recompute_num_layers: for granularity full. It is 1 if omitted.
    distribute_saved_activations: whether each tensor-parallel rank keeps 1/t of a unit's input.
    recompute_modules: the regions of granularity selective, core_attn if omitted. `pointwise`
        stands for layernorm, activation and dropout.
    recompute_policy: a text in the language of config/policy.py. It replaces the fields above and
        can describe more. AUTO: plan/auto_policy.py replaces it at the start by the fastest
        policy that fits `memory_budget`. Until then the configuration counts as one without a
        policy.
    memory_budget: an amount such as 80GiB, for everything that a rank allocates.
    activation_memory_budget: under --torch-compile, the share of its activations that a compiled
        graph may keep for backward, from 0 to 1 (training/build_trainer.py).
    contiguous_saved_activations: whether the kept inputs of recomputed units lie in one allocation,
        made once (recompute/stores.py).
    recompute_tail_skip: whether a replay leaves out its last matmul and the collective after it,
        since backward does not read the result.
    recompute_verify: whether every rebuilt tensor is compared with the forward's, and the predicted
        bytes with the measured ones.
    num_microbatches_with_partial_activation_checkpoints: for a pipeline. The forwards of a rank
        form windows as long as the rank's largest number in flight. The first so many of each
        window keep everything (2205.05198, appendix C).
    cpu_offloading_num_layers: how many of a stage's first layers keep their tensors in host memory:
        the policy 0-N:none@host.
    fine_grained_activation_offloading: whether the parts that offload_modules names keep theirs
        there in every layer: the policy *:none@host(..).
    """

    recompute_activations: bool = switch(
        "the same as --recompute-granularity selective",
        excludes="recompute_granularity=full",
        why="it means selective",
    )
    recompute_granularity: str | None = setting(
        "rebuild whole layers in backward, or --recompute-modules of each layer",
        choices="full selective",
    )
    recompute_method: str | None = setting(
        "full: units of --recompute-num-layers layers, or the first of them in a stage",
        choices=METHODS,
        without="recompute_granularity",
    )
    recompute_num_layers: int | None = setting(
        "uniform: layers of a unit; block: layers of each stage, or 0 (1 if omitted)",
        least=0,
        without="recompute_granularity",
    )
    distribute_saved_activations: bool = switch(
        "keep 1/t of a unit's input on each tensor-parallel rank",
        needs="recompute_granularity=full",
        why="only the input of a whole layer is split",
    )
    recompute_modules: tuple[str, ...] = several(
        f"regions of selective ({CORE_ATTENTION} if omitted): "
        f"{', '.join(f'{name} ({facts.help})' for name, facts in REGIONS.items())}; {ALIAS} is "
        f"{', '.join(POINTWISE)}",
        choices=(*MODULES, ALIAS),
        without="recompute_granularity=selective",
    )
    recompute_policy: str | None = setting(
        "what each layer rebuilds and where it keeps the rest, such as '0-3:full/2; "
        "every-2:core_attn+layernorm; *:full+mlp/8' (an MLP in 8 tiles of the sequence) instead "
        "of --recompute-granularity and its modules; auto chooses the fastest one that fits "
        "--memory-budget",
        excludes="recompute_activations recompute_granularity recompute_method "
        "recompute_num_layers distribute_saved_activations recompute_modules",
        why="both say what is recomputed",
    )
    memory_budget: str | None = setting(
        "for --recompute-policy auto: the memory of one rank for everything that it allocates, "
        "such as 80GiB; derived on a GPU: its memory less a reserve",
        needs="recompute_policy=auto",
        why="auto chooses a policy that fits it",
    )
    activation_memory_budget: float | None = setting(
        "under --torch-compile: compile each layer as a whole, and let the compiler choose what "
        "it keeps for backward: at most this share of its activations, 0 to 1",
        least=0.0,
        most=1.0,
        needs="torch_compile",
        # What a compiled layer keeps is not known, and every collective would end its graph.
        excludes="recompute_verify overlap_param_gather tensor_model_parallel_size>1 "
        "context_parallel_size>1 num_experts",
        why="it is the share, 0 to 1, that the compiler keeps of each layer, which is one graph",
    )
    contiguous_saved_activations: bool = switch(
        "keep the inputs of recomputed layers in one allocation, made once",
        excludes="recompute_policy=auto",
    )
    recompute_tail_skip: bool = setting(
        "replays also do their last matmul, whose result nothing reads",
        True,
        name="--no-recompute-tail-skip",
    )
    recompute_verify: bool = switch(
        "compare replays with their forward, and predicted with measured bytes; slow"
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = count(
        "in a pipeline: of as many micro-batches as are in flight at once, so many keep everything",
        needs="pipeline_model_parallel_size>1",
        excludes="recompute_policy=auto",
    )
    cpu_offloading_num_layers: int = setting(
        "keep what so many first layers of each stage save in host memory: the policy "
        "'0-N:none@host'",
        0,
        least=0,
        excludes=f"fine_grained_activation_offloading {ELSEWHERE}",
        why="one --recompute-policy with @host says both",
    )
    fine_grained_activation_offloading: bool = switch(
        "keep what --offload-modules of every layer save in host memory: the policy "
        "'*:none@host(..)'",
        excludes=ELSEWHERE,
        why="one --recompute-policy with @host says both",
    )
    offload_modules: tuple[str, ...] = several(
        "the modules", choices=MEGATRON_PARTS, without="fine_grained_activation_offloading"
    )

    def __post_init__(self) -> None:
        # A region that is given twice, or by the alias and by name, counts once.
        vars(self).update(
            recompute_modules=tuple(dict.fromkeys(expanded(self.recompute_modules))),
            offload_modules=tuple(dict.fromkeys(self.offload_modules)),
        )
        super().__post_init__()
        if self.memory_budget:
            parse_bytes("--memory-budget", self.memory_budget, least=1)
        fine, names = self.fine_grained_activation_offloading, self.offload_modules
        if fine and not names:
            raise ValueError(
                "--fine-grained-activation-offloading needs --offload-modules among "
                f"{', '.join(MEGATRON_PARTS)}: --recompute-policy '*:none@host(linear_fc1)' names "
                "the MLP's"
            )
        for part, first in SAVED_WITH.items() if fine else ():
            if part in names and first not in names:
                raise ValueError(
                    f"--offload-modules {part} needs {first}, which keeps the same tensor: add it"
                )
        if self.recompute_policy not in (None, AUTO):
            # The normal spelling: two runs with the same policy then compare equal.
            normal = str(parse_policy(self.recompute_policy))
            object.__setattr__(self, "recompute_policy", normal)
        self._resolve_granularity()
        if self.contiguous_saved_activations and not any(
            rule.action.unit for rule in self.policy.rules
        ):
            raise ContradictionError(
                "--contiguous-saved-activations is for the inputs of layers that are recomputed "
                "whole, and none is: give --recompute-granularity full, or a --recompute-policy "
                "with full",
                "contiguous_saved_activations",
            )

    def instead(self, **fields: Any) -> RecomputeConfig:
        """Returns the settings of these fields alone, with --no-recompute-tail-skip and
        --recompute-verify as they are here. Raises ValueError if the fields are illegal."""
        kept = {name: getattr(self, name) for name in ("recompute_tail_skip", "recompute_verify")}
        return RecomputeConfig(**kept, **fields)

    def _resolve_granularity(self) -> None:
        """A setting that the granularity never reads is refused where Megatron refuses it, and else
        taken out: two runs that recompute the same then compare equal. A notice says it."""
        granularity = "selective" if self.recompute_activations else self.recompute_granularity
        method, count = self.recompute_method, self.recompute_num_layers
        if granularity == "selective" and (method or count):
            given = f"--recompute-method {method}" if method else f"--recompute-num-layers {count}"
            raise ContradictionError(
                f"{given} belongs to --recompute-granularity full (got selective)",
                "recompute_method recompute_num_layers",
            )
        if granularity == "full" and method is None:
            raise ValueError(
                f"--recompute-granularity full needs --recompute-method ({' or '.join(METHODS)})"
            )
        if granularity == "full" and method == "uniform" and count == 0:
            raise ValueError(
                "--recompute-num-layers 0: a unit of --recompute-method uniform has at least 1 "
                "layer; with block, 0 recomputes none"
            )
        is_full, modules = granularity == "full", self.recompute_modules or (CORE_ATTENTION,)
        vars(self).update(
            recompute_granularity=granularity,
            recompute_method=method if is_full else None,
            recompute_num_layers=(1 if count is None else count) if is_full else None,
            recompute_modules=modules if granularity == "selective" else (),
        )

    @cached_property
    def policy(self) -> Policy:
        """The policy that the flags describe. "uniform" and "block" count the layers of a stage."""
        given = None if self.is_to_be_chosen else self.recompute_policy
        return parse_policy(given or self._as_policy())

    @property
    def is_to_be_chosen(self) -> bool:
        """Tells whether the policy is still AUTO."""
        return self.recompute_policy == AUTO

    def _as_policy(self) -> str:
        if self.cpu_offloading_num_layers:
            return f"0-{self.cpu_offloading_num_layers - 1}:none@host; *:none"
        if self.fine_grained_activation_offloading:
            return f"*:none@{store_of(self.offload_modules)}"
        if self.recompute_granularity == "selective":
            return f"*:{'+'.join(self.recompute_modules)}"
        store = "@split" if self.distribute_saved_activations else ""
        count = self.recompute_num_layers  # None without a granularity
        if self.recompute_method == "uniform":
            return f"*:full/{count}{store}"
        return f"0-{count - 1}:full{store}; *:none" if count else "*:none"
