"""The optimizer of a run: the update rule and its settings.

A new update rule needs a name in OPTIMIZERS, fields in OptimizerConfig, a module beside
`optim/adam_update.py`, and an entry in `optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megatron_lite.config.checks import flag
from megatron_lite.config.setting import check_settings, setting, switch


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

    optimizer: str = setting(
        "adam is AdamW; muon orthogonalizes the updates of layers' matrices, with AdamW for all "
        "other weights (docs/optimizers.md)",
        "adam",
        choices=tuple(OPTIMIZERS),
    )
    optimizer_impl: str = setting(
        "whose kernel computes AdamW: torch's, or NVIDIA apex's FusedAdam on CUDA (docs/apex.md)",
        "torch",
        choices=("torch", "apex"),
    )
    adam_beta1: float = setting("decay of the gradient's mean", 0.9, least=0.0, below=1.0)
    adam_beta2: float = setting("decay of the squared gradient's mean", 0.999, least=0.0, below=1.0)
    adam_eps: float = setting(
        "added to the denominator",
        1e-8,
        above=0,
        below=1,
        why=": at 0 a weight without gradient becomes NaN",
    )
    weight_decay: float = setting("decoupled weight decay of matrices", 0.01, least=0.0)
    clip_grad: float = setting("largest global gradient norm; 0 for no clipping", 1.0, least=0.0)
    muon_momentum: float = setting(
        "decay of the gradient's mean, which Muon orthogonalizes", 0.9, least=0.0, below=1.0
    )
    muon_nesterov: bool = switch(
        "orthogonalize the mean as it would be after the same gradient once more"
    )
    muon_num_ns_steps: int = setting("Newton-Schulz iterations", 5, least=1, below=100)
    muon_scale_mode: str = setting(
        "by what the orthogonal matrix of m rows and n columns is multiplied: "
        "sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        "spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = setting(
        "a further factor; with spectral, 0.2 gives updates the size of AdamW's", 1.0, above=0
    )
    muon_coefficient_type: str = setting(
        "polynomials of the Newton-Schulz iterations",
        "quintic",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_split_qkv: bool = setting(
        "orthogonalize linear_qkv as one matrix, not as three", True, name="--muon-no-split-qkv"
    )
    muon_tp_mode: str = setting(
        "a matrix that is split over tensor-parallel ranks is gathered and orthogonalized on "
        "each of them, or each orthogonalizes its own block",
        "duplicated",
        choices=("duplicated", "blockwise"),
        refused={
            "distributed": "is not built: give duplicated, which returns the same matrix on every "
            "rank, or blockwise, which sends nothing"
        },
    )
    muon_fp32_matmul_prec: str = setting(
        "Newton-Schulz in bfloat16 (medium) or in float32 (high)",
        "medium",
        choices=("medium", "high"),
        refused={"low": "is not built: give medium (bfloat16) or high (float32)"},
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_all_are_used()

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
