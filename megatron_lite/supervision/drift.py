"""Compares the tensors of which several ranks hold copies.

`--check-weight-hash-across-dp-replicas-interval N` switches it on.

    tensors                         compared over
    weights                         the data-parallel ranks, under FSDP2 those that hold the same
                                    share; those that are not split also over the TP ranks; a tied
                                    embedding also over the first and last pipeline rank
    master weights and moments      the same ranks, if every data-parallel rank holds them all;
                                    else the ranks that hold the same share of them

Without this check a fault of the memory or of a kernel on one rank would never be noticed: training
sums gradients over ranks, but never compares weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import are_equal, odd_ones_out
from megatron_lite.parallel.messages import by_rank
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.state import ParallelState, gather_texts
from megatron_lite.parallel.tensor_hash import quick_hash

# The name of a tensor of this rank, the tensor, the spec of its parameter, and whether it is one
# share of several.
_HeldTensor = tuple[str, Tensor, ParameterSpec, bool]


@dataclass
class ReplicaCheck:
    """Compares the copies after optimizer updates. Every rank must call `fault`."""

    model: nn.Module
    optimizer: Optimizer
    parallel: ParallelState

    def fault(self) -> str | None:
        """Returns which ranks hold a tensor that differs from its copies; None if all are equal.

        Every rank returns the same text. The text names a rank unless more than half of the copies
        are equal to its own. If no value has such a majority, the text names all ranks.
        Issues one all-reduce for each group and one for the agreement. If a tensor differs, it also
        gathers the hashes and the texts. Waits for the device.
        """
        self.optimizer.finish()
        held = self._held()  # nothing on a rank whose stage has no parameters
        hashes = torch.stack(
            [quick_hash(tensor).to(self.parallel.device) for _, tensor, *_ in held]
            or [torch.zeros((), dtype=torch.int64, device=self.parallel.device)]
        )
        groups = self._groups(held)
        alike = torch.stack(
            [are_equal(hashes[places], group) for places, group in groups] or [torch.tensor(True)]
        )
        if self.parallel.all_agree(bool(alike.all())):
            return None
        odd = [
            int(places[number])
            for places, group in groups
            for number in odd_ones_out(hashes[places], group)
        ]
        names = list(dict.fromkeys(held[number][0] for number in odd))
        text = "".join(names[:1])
        if len(names) > 1:
            text += f" and {len(names) - 1} more tensors"
        return by_rank(gather_texts(text, self.parallel))

    def _held(self) -> list[_HeldTensor]:
        layout = self.optimizer.layout
        if not layout.replicates_weights:
            return [(piece.name, piece.master, piece.spec, True) for piece in layout.pieces]
        weights = dict(self.model.named_parameters())
        specs = {name: spec_of(weight) for name, weight in weights.items()}
        held = [(name, weight.detach(), specs[name], False) for name, weight in weights.items()]
        is_share = layout.shard_group is not None
        if not is_share or self.parallel.replica_group is not None:
            held += [
                (f"{name}/{key}", value, specs[name], is_share)
                for name, states in self.optimizer.states.items()
                for key, value in states.items()
            ]
        return held

    def _groups(self, held: list[_HeldTensor]) -> list[tuple[Tensor, ProcessGroup]]:
        """Returns places in `held`, each with the group whose ranks must hold equal tensors."""
        parallel = self.parallel
        # Data-parallel ranks hold equal copies of all tensors, tensor-parallel ranks of those that
        # are not split, and the first and the last stage of a tied weight.
        # A view of the ranks for experts has groups of its own (parallel/expert_groups.py).
        apart = [spec.of_experts and parallel.experts is not None for _, _, spec, _ in held]
        kinds = list(zip(apart, (share for *_, share in held), strict=True))
        experts = parallel if parallel.experts is None else parallel.experts
        chosen = (
            (parallel.dp_cp_group, [one == (False, False) for one in kinds]),
            (experts.dp_cp_group, [one == (True, False) for one in kinds]),
            (parallel.replica_group, [one == (False, True) for one in kinds]),
            (experts.replica_group, [one == (True, True) for one in kinds]),
            (
                parallel.tp_group,
                [spec.tp_dim is None and not spec.of_experts for _, _, spec, _ in held],
            ),
            (parallel.embedding_group, [spec.tied for _, _, spec, _ in held]),
        )
        return [
            (torch.tensor(here, device=parallel.device).nonzero().view(-1), group)
            for group, here in chosen
            if group is not None and any(here)
        ]
