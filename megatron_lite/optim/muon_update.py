"""The update rule Muon (kellerjordan.github.io/posts/muon; arXiv 2502.16982): `--optimizer muon`.

    momentum  <- momentum + (1 - beta) (gradient - momentum)
    direction  = momentum, or gradient + beta (momentum - gradient) under `--muon-nesterov`
    weight    <- (1 - rate decay) weight - rate scale orthogonalize(direction)

The rule holds for the matrices of layers: linear_qkv (three matrices, unless
`--muon-no-split-qkv`), linear_proj, linear_fc1 (one matrix, also if swiglu stacks gate and up in
it) and linear_fc2. All other weights are AdamW's, at the same learning rate.

Orthogonalizing needs a whole matrix, and a rank may hold a piece of one:

    ZeRO-1, FSDP2   directions are gathered over the data-parallel ranks, one matrix at a time.
                    A rank orthogonalizes the matrices of which it holds a piece.
    TP              rows or columns are gathered over the TP ranks. Each orthogonalizes the whole
                    matrix and keeps its shard.

Orthogonalizing is a Newton-Schulz iteration, without an SVD:

    X <- a X + b (X X^T) X + c (X X^T)^2 X        from X = M / |M|, the Frobenius norm

Each step maps every singular value s of X to a s + b s^3 + c s^5 and leaves the singular vectors as
they are. A few steps bring all singular values near 1 (within about 0.3), which Muon is content
with. The norm counts as EPSILON if it is less, so that a matrix of zeros stays one.

The update of torch.optim.Muon is that of `--muon-coefficient-type simple --muon-no-split-qkv`, with
`--muon-scale-mode shape_scaling` for its adjustment "original", or `--muon-extra-scale-factor 0.2`
for "match_rms_adamw".
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState

from .adam_update import AdamW, Rate
from .layouts import Bucketed

MOMENTUM = "momentum_buffer"
EPSILON = 1e-7


Coefficients = tuple[float, float, float]  # a, b and c of one step
# Keller Jordan, kellerjordan.github.io/posts/muon: the steepest polynomial at 0, in every step.
SIMPLE = ((3.4445, -4.7750, 2.0315),)
# leloykun.github.io/ponder/muon-opt-coeffs: five steps to a narrow band of singular values.
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# arXiv 2505.16932, with its safety factor of 1.01: the last step repeats.
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
# By the name of --muon-coefficient-type: the coefficients of the first so many steps.
STEPS = {
    "simple": lambda number: SIMPLE * number,
    "quintic": lambda number: (QUINTIC * number)[:number],
    "polar_express": lambda number: (POLAR_EXPRESS + POLAR_EXPRESS[-1:] * number)[:number],
}
# By the name of --muon-scale-mode: what an update of m rows and n columns is multiplied by.
SCALES = {
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "unit_rms_norm": lambda m, n: math.sqrt(m / n),
    "shape_scaling": lambda m, n: math.sqrt(max(1, m / n)),
}


def orthogonalize(matrix: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Returns about the nearest orthogonal matrix: [m, n] -> [m, n], a new tensor of that dtype.

    The Gram matrix is that of the shorter side, l = min(m, n): a step costs 4 l m n + 2 l^3 FLOPs.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    iterate = matrix.T if is_tall else matrix
    iterate = iterate / iterate.norm().clamp(min=EPSILON)
    # With G = X X^T, [l, l], one step is a X + (b G + c G G) X.
    for a, b, c in steps:
        gram = torch.mm(iterate, iterate.T)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        iterate = torch.addmm(iterate, polynomial, iterate, beta=a)
    return iterate.T if is_tall else iterate


class Muon(AdamW):
    """AdamW, with the momentum and the update of Muon for the matrices of layers.

    Under ZeRO-1 and FSDP2 a step issues one all-gather of float32 for each parameter with matrices
    over the data-parallel ranks. Under `--muon-tp-mode duplicated` it issues one for each matrix
    over the TP ranks, of bfloat16 unless `--muon-fp32-matmul-prec high`.
    """

    def __init__(self, layout: Bucketed, config: OptimizerConfig, parallel: ParallelState) -> None:
        self._layout = layout
        self._matrices = {name: spec for name, spec in layout.specs.items() if spec.matrices}
        super().__init__(layout, config, parallel)
        self._tp_group = parallel.tp_group if config.muon_tp_mode == "duplicated" else None
        self._scale = SCALES[config.muon_scale_mode]
        self._steps = STEPS[config.muon_coefficient_type](config.muon_num_ns_steps)
        self._pieces = {one.name: one for one in layout.pieces if one.name in self._matrices}

    def state_names(self, parameter: str) -> tuple[str, ...]:
        """Implements AdamW.state_names."""
        return (MOMENTUM,) if parameter in self._matrices else self.names

    @torch.no_grad()
    def step(self, rate: Rate, rate_at_the_ends: Rate, skipped: Tensor) -> None:
        """Implements AdamW.step. The matrices are those of layers, so they have the rate of all."""
        super().step(rate, rate_at_the_ends, skipped)
        stays = skipped.bool()
        for name in self._matrices:
            self._move(name, float(rate), stays)

    def _move(self, name: str, learning_rate: float, stays: Tensor) -> None:
        """Moves the momentum and this rank's piece of a parameter, unless the step is skipped.

        The tensors of one parameter are gone before those of the next one are made.
        """
        piece = self._pieces.get(name)
        own = None
        if piece is not None:
            momentum, beta = piece.states[MOMENTUM], self.config.muon_momentum
            torch.where(stays, momentum, momentum.lerp(piece.grad, 1.0 - beta), out=momentum)
            own = piece.grad.lerp(momentum, beta) if self.config.muon_nesterov else momentum
        direction = self._layout.whole(name, own)
        if piece is None:  # nor has any rank of the TP group one: all cut their shards alike
            return
        update = self._update(direction, self._matrices[name])
        update = update.reshape(-1)[piece.start : piece.stop].view(piece.master.shape)
        # `where` decides on the device; to read `skipped` would make the host wait.
        moved = piece.master.mul(1.0 - learning_rate * self.config.weight_decay).add_(
            update, alpha=-learning_rate
        )
        torch.where(stays, piece.master, moved, out=piece.master)

    def _update(self, direction: Tensor, spec: ParameterSpec) -> Tensor:
        """Returns the update of a direction. Both are this TP rank's shard, [m, n]."""
        rows = spec.matrices if self.config.muon_split_qkv else (1,)
        # [groups, rows of one matrix in each, n]
        parts = direction.view(-1, sum(rows), direction.shape[1]).split(rows, 1)
        updates = [self._scaled(part.flatten(0, 1), spec.tp_dim).view(part.shape) for part in parts]
        return torch.cat(updates, 1).view(direction.shape)

    def _scaled(self, shard: Tensor, tp_dim: int | None) -> Tensor:
        """Returns the update of one matrix's shard [m, n]. Issues one all-gather over TP."""
        group = self._tp_group if tp_dim is not None else None
        iterated = shard.bfloat16() if self.config.muon_fp32_matmul_prec == "medium" else shard
        # Rows may stand in another order than in the global weight, as gate and up do under swiglu.
        # That is harmless: orthogonalizing commutes with a permutation of rows. The collective
        # joins dim 0, so columns are gathered as the rows of the transposed shard.
        if tp_dim == 1:
            whole = all_gather_first_dim(iterated.T, group).T
        else:
            whole = all_gather_first_dim(iterated, group)
        orthogonal = orthogonalize(whole, self._steps)
        if group is not None and tp_dim is not None:
            orthogonal = orthogonal.chunk(group.size(), tp_dim)[group.rank()]
        return orthogonal.to(shard.dtype) * (
            self._scale(*whole.shape) * self.config.muon_extra_scale_factor
        )
