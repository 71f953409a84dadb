"""The optimizer of a run: the update rule, its settings, and the refused flags of Megatron.

A new update rule needs a name in OPTIMIZERS, fields in OptimizerConfig, flags in
`cli/arguments/optimizer_flags.py`, a module beside `optim/adam_update.py`, and an entry in
`optim/optimizer.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron_lite.config.checks import flag, require_at_least, require_one_of, require_within


class StateBytes(NamedTuple):
    """The bytes of float32 state that an update rule keeps for each parameter.

    The master weight is not included.

    matrix: for the weights of linear_qkv, linear_proj, linear_fc1 and linear_fc2.
    other: for all other parameters.
    """

    matrix: int
    other: int


OPTIMIZERS: Mapping[str, StateBytes] = {
    "adam": StateBytes(matrix=8, other=8),
    "muon": StateBytes(matrix=4, other=8),
}
OPTIMIZER_IMPLS = ("torch", "apex")
MUON_SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
MUON_COEFFICIENT_TYPES = ("simple", "quintic", "polar_express")
MUON_TP_MODES = ("duplicated", "blockwise")
MUON_MATMUL_PRECISIONS = ("medium", "high")

# The reason, and the flags of Megatron that are refused for it.
REFUSED_OPTIMIZER_FLAGS: tuple[str, str] = (
    (
        "the optimizer is AdamW, or Muon with AdamW for what is no matrix, on the device of the "
        "model; use --optimizer adam or muon"
    ),
    """dump-param-to-param-group-map exp-avg-dtype exp-avg-sq-dtype main-grads-dtype
     main-params-dtype muon-scalar-optimizer muon-use-syrk optimizer-cpu-offload""",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule, weight decay and gradient clipping.

    optimizer: "adam" is AdamW. "muon" updates the matrices of layers by Muon and all other weights
        by AdamW.
    optimizer_impl: "torch" or "apex", the library whose kernel computes AdamW.
    muon_split_qkv: whether the query, key and value rows of linear_qkv are orthogonalized as three
        matrices, or else as one.
    muon_tp_mode: for a matrix that is split over TP ranks. "duplicated" gathers it and
        orthogonalizes the whole matrix on every rank. "blockwise" orthogonalizes each rank's part
        and issues no collective.
    muon_fp32_matmul_prec: the format of the Newton-Schulz iteration. "medium" is bfloat16, "high"
        is the format of the master weights.
    """

    optimizer: str = "adam"
    optimizer_impl: str = "torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    muon_momentum: float = 0.9
    muon_nesterov: bool = False
    muon_num_ns_steps: int = 5
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_coefficient_type: str = "quintic"
    muon_split_qkv: bool = True
    muon_tp_mode: str = "duplicated"
    muon_fp32_matmul_prec: str = "medium"

    def __post_init__(self) -> None:
        require_one_of(self, "optimizer", tuple(OPTIMIZERS))
        require_one_of(self, "optimizer_impl", OPTIMIZER_IMPLS)
        require_within(self, 0.0, 1.0, "adam_beta1", "adam_beta2", "muon_momentum")
        require_at_least(self, 0.0, "weight_decay", "clip_grad")
        if not 0.0 < self.adam_eps < 1.0:
            raise ValueError(
                f"--adam-eps must be in (0, 1) (got {self.adam_eps}): at 0 a weight without "
                "gradient becomes NaN"
            )
        self._check_muon()
        self._check_all_are_used()

    def _check_muon(self) -> None:
        if self.muon_tp_mode == "distributed":
            raise ValueError(
                "--muon-tp-mode distributed is not built: give duplicated, which returns the same "
                "matrix on every rank, or blockwise, which sends nothing"
            )
        if self.muon_fp32_matmul_prec == "low":
            raise ValueError(
                "--muon-fp32-matmul-prec low is not built: give medium (bfloat16) or high (float32)"
            )
        require_one_of(self, "muon_scale_mode", MUON_SCALE_MODES)
        require_one_of(self, "muon_coefficient_type", MUON_COEFFICIENT_TYPES)
        require_one_of(self, "muon_tp_mode", MUON_TP_MODES)
        require_one_of(self, "muon_fp32_matmul_prec", MUON_MATMUL_PRECISIONS)
        require_within(self, 1, 100, "muon_num_ns_steps")
        if not 0.0 < self.muon_extra_scale_factor < math.inf:
            raise ValueError(
                "--muon-extra-scale-factor must be above 0 and finite (got "
                f"{self.muon_extra_scale_factor})"
            )

    def _check_all_are_used(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for rule, names in OWN_SETTINGS.items():
            for name in names:
                if self.optimizer != rule and (value := getattr(self, name)) != defaults[name]:
                    given = (
                        "--muon-no-split-qkv"
                        if name == "muon_split_qkv"
                        else f"{flag(name)} {value}"
                    )
                    raise ValueError(
                        f"{given.removesuffix(' True')} needs --optimizer {rule} (got "
                        f"{self.optimizer})"
                    )


# The settings that only one update rule reads. AdamW's settings are in no entry: muon also updates
# some weights by AdamW.
OWN_SETTINGS: Mapping[object, tuple[str, ...]] = {
    rule: tuple(
        field.name for field in fields(OptimizerConfig) if field.name.startswith(f"{rule}_")
    )
    for rule in OPTIMIZERS
    if rule != "adam"
}
