"""The update rules of single elements: SGD and AdamW, by torch's fused kernels.

An update rule changes master weights by their gradients, and owns the states for that. It never
waits for the device, unless a piece is on the host. If `skipped` is 1, a step changes nothing and
does not count.
"""

from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.parallel.compiled import Kernels
from megatron_lite.parallel.rng import derive_seed
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import fused_adamw_

from .layouts import Bucketed, Piece
from .stored import new_state, update_apart

Rate = float | Tensor  # a 0-d tensor in a CUDA graph: float32 there, float64 on a CPU


# whether the pieces of a group are on the host, apart, without weight decay, and at an end
Kind = tuple[bool, bool, bool, bool]


def _groups(pieces: Sequence[Piece], has_ends: bool) -> list[tuple[Kind, list[Piece]]]:
    """Returns the pieces that share a weight decay and a learning rate.

    has_ends: whether the ends of the model have a learning rate of their own (--decoupled-lr).
    """

    def kind_of(one: Piece) -> Kind:
        return one.on_host, one.apart, not one.decays, has_ends and one.at_an_end

    # The host comes last, so that the device works while the host does.
    groups = groupby(sorted(pieces, key=kind_of), kind_of)
    return [(kind, [*group]) for kind, group in groups]


class AdamW:
    """AdamW by torch's fused kernel. Its states are the means of the gradient and of its square.

    A rule makes the states of the layout's pieces, and updates them.

    It issues no collective. It calls the kernel of torch.optim.AdamW(fused=True): creating a
    torch.optim.Optimizer imports torch._dynamo, which takes more than a second of every start, and
    raises a count for each parameter.

    names: those of the states, as in checkpoints.
    count: how many updates the states have seen, 0-d. During a step it includes this one, unlike
        count_on_host, the same for the pieces there.
    link: the way to the host; None if no piece is there.
    kernels: compiled kernels; None: torch's operators update what stored.py updates.
    keys[parameter]: the seed of the rounding of its main weight, by `--stochastic-rounding`.
    """

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    kernels: Kernels = None

    def __init__(self, layout: Bucketed, config: OptimizerConfig, parallel: ParallelState) -> None:
        self.config, self.link, rng = config, layout.link, parallel.rng
        # a subclass has rules of its own for pieces with other states
        pieces = [one for one in layout.pieces if self.state_names(one.name) == self.names]
        self.keys = {
            one.name: derive_seed(
                "rounding", rng.seed, one.name, rng.tp_rank * (one.spec.tp_dim is not None)
            )
            for one in pieces
            if config.stochastic_rounding
        }
        for piece in layout.pieces:
            for key in self.state_names(piece.name):
                kind = config.format_of(key)
                piece.states[key] = new_state(piece.master, kind, piece.master.device)
        self._grouped = cache(partial(_groups, pieces))
        self.count = torch.zeros((), dtype=torch.float32, device=rng.device)
        self.count_on_host = torch.zeros((), dtype=torch.float32, device="cpu")

    def state_names(self, _: str) -> tuple[str, ...]:
        """Returns the names of a parameter's states, as in checkpoints.

        They are the same on every rank, whether it has a piece of the parameter or not.
        """
        return self.names

    @torch.no_grad()
    def step(self, rate: Rate, rate_at_the_ends: Rate, skipped: Tensor) -> None:
        """Makes one update, or none if `skipped` (0-d float32) is 1.

        Every rank must call this, also one without pieces: a rule may issue collectives.
        rate_at_the_ends: the learning rate of the word embedding and the output layer.
        """
        groups = self._grouped(rate_at_the_ends is not rate)
        if skipped.device.type == "cuda" and not isinstance(rate, Tensor):
            # as the kernel reads a tensor, so that a step in a CUDA graph has the same bits
            rate, rate_at_the_ends = torch.tensor([rate, rate_at_the_ends]).tolist()
        apart = []
        self.count += 1.0
        for (_, is_apart, stays, at_an_end), pieces in groups:
            settings = dict(
                lr=rate_at_the_ends if at_an_end else rate,
                weight_decay=self.config.weight_decay * (not stays),
            )
            if is_apart:
                apart.append((pieces, settings))
                continue
            self.update(
                [piece.master for piece in pieces],
                [piece.grad for piece in pieces],
                [[piece.states[key] for piece in pieces] for key in self.names],
                [self.count] * len(pieces),
                found_inf=skipped,
                **settings,
            )
        if apart:
            update_apart(self, apart, skipped)
        self.count -= skipped

    def update(
        self,
        masters: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[Tensor],
        **settings: Any,
    ) -> None:
        """Updates masters and states in place. states: a list of tensors for each of `names`.

        steps: the numbers of their updates, this one included.
        """
        fused_adamw_(
            masters,
            grads,
            *states,
            [],
            steps,
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            eps=self.config.adam_eps,
            maximize=False,
            **settings,
        )


class Sgd(AdamW):
    """SGD by torch's fused kernel, as Megatron has it: the momentum buffer sums up gradients, to
    which the weight decay is added. Without momentum it has no state."""

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The momentum buffer, if there is a momentum."""
        return ("momentum_buffer",) * bool(self.config.sgd_momentum)

    def update(self, *tensors: Any, **settings: Any) -> None:
        """Implements AdamW.update."""
        masters, grads, states, _ = tensors
        sgd(
            masters,
            grads,
            states[0] if states else [None] * len(masters),
            fused=True,
            momentum=self.config.sgd_momentum,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            **settings,
        )
