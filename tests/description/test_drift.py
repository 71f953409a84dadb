"""The description of a layer against the real model, module by module, in every configuration.

A dispatch mode watches one forward of a whole model: which module saves which bytes for backward,
which matmuls it runs, which collectives it issues. The same figures are read from description/.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from operator import add
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.measure.meter import kept_for_backward, running_modules
from tests.memory.test_collectives import TORCH_NAMES
from tests.support import pairs
from tests.support.dispatch import Dispatches
from tests.support.equality import GATHERED, SENT, VARIANTS, variant_config
from tests.support.flash_flops import FORMULAS
from tests.support.models import Layout, sample_tokens
from tests.support.ranks import run_ranks
from tests.support.torch_features import HAS_GRAD_DTYPE

NUM_LAYERS = 2
DIFFERING = dict(window_size=(3, 0), window_attn_skip_freq=(1, 0), no_rope_freq=(0, 1))
FORMULA_OF = {
    **flop_registry,
    **{kernel: shape_wrapper(formula) for kernel, formula in FORMULAS.items()},
}
# Layouts in which two ranks hold different experts, with further fields of ParallelConfig.
EXPERT_LAYOUTS = {
    "ep2": (Layout(), SENT),
    "ep2, all tokens gathered": (Layout(), GATHERED),
    "ep2, tp2 shares no expert": (Layout(2, True), dict(SENT, expert_tensor_parallel_size=1)),
    "tp2 shares no expert": (Layout(2, True), dict(expert_tensor_parallel_size=1)),
    "ep2, tp4 shares in twos": (Layout(4, True), dict(SENT, expert_tensor_parallel_size=2)),
}


class Figures(NamedTuple):
    """What one module of the model keeps, computes, sends and holds."""

    kept_bytes: int = 0
    matmul_flops: tuple[int, ...] = ()
    collectives: tuple[str, ...] = ()
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Watched(Dispatches):
    """Records the FLOPs of matmuls and the kinds of collectives by the module that runs."""

    def __init__(self, running):
        super().__init__()
        self.running = running
        self.flops = defaultdict(list)
        self.collectives = defaultdict(list)

    def saw(self, func, args, kwargs, results):
        module = place(self.running[-1] if self.running else "")
        formula = FORMULA_OF.get(func._overloadpacket)
        if formula is not None:
            self.flops[module].append(formula(*args, **kwargs, out_val=results))
        if func.namespace == "c10d":
            self.collectives[module].append(TORCH_NAMES[func.name().split("::")[1]])


def place(module):
    """Returns the module whose operation this is: the norms of query and key are one operation."""
    for norm in (".q_layernorm", ".k_layernorm", ".kv_layernorm"):
        module = module.removesuffix(norm)
    return "embedding" if module.startswith("embedding") else module


def measured(model):
    """Returns the figures of every module in one forward, and the rows of each layer's experts."""
    with (
        running_modules(model) as running,
        kept_for_backward(exclude=model.parameters(), model=model) as meter,
    ):
        with Watched(running) as watched:
            loss = model(*sample_tokens())
        kept = Counter()
        for storage in meter.storages().values():
            kept[place(storage.label)] += storage.num_bytes
        del loss
    parameters = defaultdict(list)
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        short = (
            own if place(module) == module else f"{module.removeprefix(place(module) + '.')}.{own}"
        )
        parameters[place(module)].append((short, tuple(parameter.shape)))
    modules = {*kept, *watched.flops, *watched.collectives, *parameters}
    for module in modules if not HAS_GRAD_DTYPE else ():  # on a CPU, each expert has a product
        if ".linear_fc" in module:
            watched.flops[module] = [sum(watched.flops[module])]
    rows = tuple(getattr(layer.mlp, "num_rows", ()) for layer in model.decoder.layers)
    return {
        module: Figures(
            kept[module],
            tuple(watched.flops[module]),
            tuple(watched.collectives[module]),
            tuple(sorted(parameters[module])),
        )
        for module in modules
    }, rows


def described(sizes):
    """Returns the same figures as the description has them."""
    prefixed = [("", one) for one in embedding_operations(sizes)]
    for number, layer in enumerate(describe_layers(sizes, [1] * NUM_LAYERS)):
        prefixed += [(f"decoder.layers.{number}.", one) for one in layer.operations]
    prefixed += [("", one) for one in head_operations(sizes)]
    seen = defaultdict(set)
    found = {}
    for prefix, operation in prefixed:
        module = f"{prefix}{operation.module}".removesuffix(".")
        # Tables are one storage for all layers; other names are unique within a layer.
        new = [
            tensor
            for tensor in operation.keeps
            if tensor.name not in seen["" if tensor.shared else prefix]
        ]
        for tensor in new:
            seen["" if tensor.shared else prefix].add(tensor.name)
        own = Figures(
            sum(tensor.num_bytes for tensor in new),
            tuple(
                sum(matmul.flops for matmul in call.matmuls)
                for call in operation.calls
                if call.matmuls
            ),
            tuple(collective.kind for collective in operation.forward),
            tuple((parameter.name, parameter.shape) for parameter in operation.parameters),
        )
        both = Figures(*map(add, found.get(module, Figures()), own))
        found[module] = both._replace(parameters=tuple(sorted(both.parameters)))
    return found


def wrong(rank, world_size, layout, fields=None):
    """Returns {configuration: {module: (measured, described)}} where the two differ.

    fields: those of ParallelConfig that spread experts.
    """
    found = {}
    cases = list(
        product(VARIANTS, ("flash", "unfused"), (0.0, 0.1), (torch.float32, torch.bfloat16))
    )
    if not pairs.FULL_GRIDS:
        cases = pairs.covered(cases)
    if fields is not None:
        names = ("mixtral", "deepseek", "gshard")
        cases = [(name, "flash", 0.0, torch.float32) for name in names]
    with layout.state(**(fields or {})) as parallel:
        for variant, backend, dropout, dtype in cases:
            rotates = VARIANTS[variant].get("position_embedding_type") == "rope"
            differing = dict(DIFFERING) if rotates else {}
            if "multi_latent_attention" in VARIANTS[variant]:
                del differing["no_rope_freq"]
            config = variant_config(
                variant,
                num_layers=NUM_LAYERS,
                attention_backend=backend,
                hidden_dropout=dropout,
                attention_dropout=dropout,
                # some tokens are dropped
                **(dict(moe_expert_capacity_factor=0.9) if fields and variant == "mixtral" else {}),
                **differing,
            )
            sizes = layout.sizes(config, dtype)
            real, rows = measured(layout.model(config, parallel, dtype=dtype))
            if fields is not None:
                sizes = replace(
                    sizes,
                    ep_size=fields.get("expert_model_parallel_size", 1),
                    expert_tp_size=fields.get("expert_tensor_parallel_size", 0),
                    gathers_tokens=fields.get("moe_token_dispatcher_type") == "allgather",
                    expert_rows=rows,
                )
            told = described(sizes)
            differ = {
                module: (real.get(module), told.get(module))
                for module in {*real, *told}
                if real.get(module, Figures()) != told.get(module, Figures())
            }
            if differ:
                found[f"{variant} {backend} {dropout} {dtype}"] = differ
    return found


@pytest.mark.runs
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, True)])
def test_every_module_keeps_computes_sends_and_holds_what_is_described(layout):
    assert run_ranks(wrong, layout.ranks, layout) == [{}] * layout.ranks


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_of_other_ranks_keep_send_and_hold_what_is_described(layout):
    """Given the rows of each rank's experts, which are data."""
    place, fields = EXPERT_LAYOUTS[layout]
    ranks = max(place.ranks, 2)
    assert run_ranks(wrong, ranks, place, fields) == [{}] * ranks
