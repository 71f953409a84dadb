"""Activation recomputation: Megatron's flags, as values. What they mean layer by layer is in recompute/schedule.py."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.checks import require_at_least
from megatron_lite.config.policy import Policy, parse_policy
from megatron_lite.config.recompute_modules import MODULES, POINTWISE

GRANULARITIES = ("full", "selective")
METHODS = ("uniform", "block")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """What is rebuilt in backward instead of kept. Without `recompute_granularity`, nothing.

    recompute_activations: another way to say `--recompute-granularity selective`.
    recompute_num_layers: uniform: layers of a unit; block: units per pipeline stage. 1 where it is omitted.
    recompute_modules: regions of selective; core_attn where it is omitted. `pointwise` stands for layernorm, activation, dropout.
    recompute_policy: the same and more in the language of config/policy.py, instead of the flags above.
    activation_memory_budget: under --torch-compile, the share of what a graph would keep that it may keep (training/compiler.py).
    contiguous_saved_activations: the kept inputs of recomputed units lie in one allocation, made once (recompute/arena.py).
    num_microbatches_with_partial_activation_checkpoints: in a pipeline, of as many micro-batches as are in flight at once, so
    many keep everything (2205.05198, appendix C).
    recompute_tail_skip: a replay leaves out the last matmul of what it rebuilds, with its collective: nothing reads the result.
    recompute_verify: compare every rebuilt tensor with that of the forward, and predicted with measured bytes.
    """

    recompute_activations: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    distribute_saved_activations: bool = False
    recompute_modules: tuple[str, ...] = ()
    recompute_policy: str | None = None
    activation_memory_budget: float | None = None
    contiguous_saved_activations: bool = False
    recompute_tail_skip: bool = True
    recompute_verify: bool = False
    num_microbatches_with_partial_activation_checkpoints: int | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        if self.recompute_policy is not None:
            self._refuse_without("and --recompute-policy are two ways to say what is recomputed: leave one of them out",
                                 "recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers",
                                 "distribute_saved_activations", "recompute_modules")
            object.__setattr__(self, "recompute_policy", str(parse_policy(self.recompute_policy)))
        if self.recompute_activations:
            if self.recompute_granularity == "full":
                raise ValueError("--recompute-activations means --recompute-granularity selective, but full is given too: leave "
                                 "one of them out")
            object.__setattr__(self, "recompute_granularity", "selective")
        if self.recompute_granularity is None:
            self._refuse_without("needs --recompute-granularity", "recompute_method", "recompute_num_layers",
                                 "distribute_saved_activations", "recompute_modules")
        elif self.recompute_granularity == "selective":
            self._refuse_without("belongs to --recompute-granularity full (got selective)", "recompute_method",
                                 "recompute_num_layers", "distribute_saved_activations")
            object.__setattr__(self, "recompute_modules", self.recompute_modules or ("core_attn",))
        else:
            self._refuse_without("belongs to --recompute-granularity selective (got full)", "recompute_modules")
            if self.recompute_method is None:
                raise ValueError(f"--recompute-granularity full needs --recompute-method ({' or '.join(METHODS)})")
            object.__setattr__(self, "recompute_num_layers", self.recompute_num_layers or 1)
        if self.contiguous_saved_activations and not any(rule.action.unit for rule in self.policy.rules):
            raise ValueError("--contiguous-saved-activations is for the inputs of layers that are recomputed whole, and none is: "
                             "give --recompute-granularity full, or a --recompute-policy with full")

    @property
    def policy(self) -> Policy:
        """What the flags say, in the language of policies; block and uniform count layers of a stage."""
        if self.recompute_policy is not None:
            return parse_policy(self.recompute_policy)
        return parse_policy(self._as_policy())

    def _as_policy(self) -> str:
        if self.recompute_granularity is None:
            return "*:none"
        if self.recompute_granularity == "selective":
            return "*:" + "+".join(self.recompute_modules)
        store = "@split" if self.distribute_saved_activations else ""
        count = self.recompute_num_layers or 1
        if self.recompute_method == "uniform":
            return f"*:full/{count}{store}"
        return f"0-{count - 1}:full{store}; *:none"

    def _check_choices(self) -> None:
        words = [word for module in self.recompute_modules for word in (POINTWISE if module == "pointwise" else (module,))]
        object.__setattr__(self, "recompute_modules", tuple(dict.fromkeys(words)))
        require_at_least(self, 1, "recompute_num_layers", "num_microbatches_with_partial_activation_checkpoints")
        if self.activation_memory_budget is not None and not 0.0 <= self.activation_memory_budget <= 1.0:
            raise ValueError("--activation-memory-budget is a ratio between 0 (keep least) and 1 (recompute nothing), not a "
                             f"number of bytes (got {self.activation_memory_budget})")
        for flag, value, allowed in (("--recompute-granularity", self.recompute_granularity, GRANULARITIES),
                                     ("--recompute-method", self.recompute_method, METHODS)):
            if value is not None and value not in allowed:
                raise ValueError(f"{flag} must be one of {', '.join(allowed)} (got {value!r})")
        unknown = [module for module in self.recompute_modules if module not in MODULES]
        if unknown:
            raise ValueError(f"--recompute-modules must be among {', '.join(MODULES)}, pointwise (got {' '.join(unknown)})")

    def _refuse_without(self, rule: str, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if value:
                shown = " ".join(value) if isinstance(value, tuple) else "" if value is True else str(value)
                raise ValueError(f"--{field.replace('_', '-')}{' ' + shown if shown else ''} {rule}")
