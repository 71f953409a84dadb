"""The repeated layers of a model, and which of them are alike.

Layers are alike if they have the same classes, parameters, frozen parameters and settings. Numbers
are not compared, because a layer may hold its own number. Those that are also called alike and save
as much (`Sharing.kinds`) are of one kind: what is measured on one of them holds for all.
"""

import re
from collections import Counter
from collections.abc import Hashable, Sequence

from torch import nn

from megatron_lite.recompute.apply import layers_of, lists_in


def layer_lists(
    model: nn.Module, layers_fqn: str | Sequence[str] | None
) -> dict[str, list[nn.Module]]:
    """Returns the lists of layers of a model, by name: those that are named, or the outermost ones
    in which a layer is repeated, with those of the same name in other stages of the model.

    Raises ValueError if a name is no module, or if no layer is repeated.
    """
    names = [layers_fqn] if isinstance(layers_fqn, str) else layers_fqn
    if names is not None and not (isinstance(names, Sequence) and names):
        raise ValueError(
            f"layers_fqn {layers_fqn!r}: give the name of a list of layers, or several in a list"
        )
    if names is None:
        # In another stage of the model no two layers of such a list may be alike. A list in a list
        # may have one layer of each kind.
        stages: dict[str, list[nn.Module]] = {}
        for name, layers in (lists := lists_in(model)).items():
            stages.setdefault(stage_of(name), []).extend(layers)
        most = {stage: _most_alike(layers) for stage, layers in stages.items()}
        # If no list has two, the model may call one layer again and again.
        if (least := min(2, max(most.values(), default=0))) < 1:
            raise ValueError(
                f"{type(model).__name__} has no list in which a layer is repeated, so no policy "
                "can save memory: give a model that has one, or name the list of its layers with "
                "layers_fqn= of fit_memory_"
            )
        found: dict[int, str] = {}
        for name, layers in lists.items():
            is_inside = any(name.startswith(f"{other}.") for other in found.values())
            if not is_inside and _most_alike(layers) and most[stage_of(name)] >= least:
                found[id(layers[0])] = name
        names = [*found.values()]
    return {name: layers_of(model, name) for name in names}


def stage_of(name: str) -> str:
    """Returns what the names of lists in different stages of a model have in common."""
    return re.sub(r"\d+", "", name)


def kind_of(layer: nn.Module) -> Hashable:
    """Returns a value that is equal for layers that are alike."""
    weights = tuple(
        (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        for name, weight in layer.named_parameters()
    )
    settings = tuple(
        (type(module), *(item for item in vars(module).items() if isinstance(item[1], (bool, str))))
        for module in layer.modules()
    )
    return weights, settings


def _most_alike(layers: list[nn.Module]) -> int:
    """Returns how many are of one kind. A layer has modules inside, or is no class of torch."""
    kinds = Counter(
        kind_of(layer)
        for layer in layers
        if list(layer.parameters())
        and (any(True for _ in layer.children()) or "torch." not in f"{type(layer).__module__}.")
    )
    return max(kinds.values(), default=0)
