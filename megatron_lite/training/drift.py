"""Whether what several ranks hold alike still is alike: `--check-weight-hash-across-dp-replicas-interval N`.

    weights               over the data-parallel ranks (not under FSDP2, which keeps one copy); those that are not split, over the
                          tensor-parallel ranks too; a tied embedding, over the first and last pipeline rank
    masters and moments   the same, where every data-parallel rank holds them all

A fault of memory or of a kernel on one rank would otherwise go on for ever: gradients are summed, and weights never compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.optim.adamw import Optimizer
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.texts import by_rank, gather_texts
from megatron_lite.parallel.weight_hash import are_equal, odd_ones_out, weight_hashes


class _Held(NamedTuple):
    """A tensor of this rank, and the mark of its parameter."""

    name: str
    tensor: Tensor
    spec: ParameterSpec


class ReplicaCheck:
    """Compares after updates. Every rank must call; `fault` waits for the device."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, parallel: ParallelState) -> None:
        self._model, self._optimizer, self._parallel = model, optimizer, parallel

    def notice(self) -> str | None:
        """What is not compared, for the log."""
        parallel, flag = self._parallel, "--check-weight-hash-across-dp-replicas-interval"
        rest = " (weights that tensor-parallel ranks or the ends of the pipeline hold alike are)" \
            if parallel.tp_group is not None or parallel.pp_group is not None else ""
        if parallel.data_group is None:
            return f"{flag} compares nothing over data-parallel ranks: there is one{rest}"
        if not self._optimizer.layout.replicates_weights:
            return f"{flag} compares nothing over data-parallel ranks: --use-torch-fsdp2 keeps one copy{rest}"
        return None

    def fault(self) -> str | None:
        """Which ranks hold what differs from its copies; None where nothing does. Each rank returns the same.

        A rank is named where less than half of the copies are like its own; where that is nobody's, all are.
        """
        self._optimizer.finish()
        held = self._held()
        hashes = weight_hashes([one.tensor for one in held], self._parallel.device)
        groups = self._groups(held)
        alike = torch.stack([are_equal(hashes[places], group) for places, group in groups] or [torch.tensor(True)])
        if self._parallel.all_agree(bool(alike.all())):
            return None
        odd = [int(places[number]) for places, group in groups for number in odd_ones_out(hashes[places], group)]
        names = list(dict.fromkeys(held[number].name for number in odd))
        text = names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "") if names else ""
        return by_rank(gather_texts(text, self._parallel))

    def _held(self) -> list[_Held]:
        layout, specs = self._optimizer.layout, {name: spec_of(value) for name, value in self._model.named_parameters()}
        if not layout.replicates_weights:
            return [_Held(piece.name, piece.master, piece.spec) for piece in layout.pieces]
        held = [_Held(name, value.detach(), specs[name]) for name, value in self._model.named_parameters()]
        if layout.shard_group is None:
            held += [_Held(f"{name}/{key}", value, specs[name]) for name, states in self._optimizer.states.items()
                     for key, value in states.items()]
        return held

    def _groups(self, held: list[_Held]) -> list[tuple[Tensor, ProcessGroup]]:
        """Places in `held`, and the group whose ranks must hold the same there."""
        parallel = self._parallel
        chosen = ((parallel.data_group if self._optimizer.layout.replicates_weights else None, [True for _ in held]),
                  (parallel.tp_group, [one.spec.tp_dim is None for one in held]),
                  (parallel.embedding_group, [one.spec.tied for one in held]))
        return [(torch.tensor(here, device=parallel.device).nonzero().view(-1), group) for group, here in chosen
                if group is not None and any(here)]
