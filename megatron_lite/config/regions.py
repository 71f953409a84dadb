"""The regions of a transformer layer that `--recompute-modules` and `--recompute-policy` can name.

This table is the only place that holds facts about a region. The flags and their help, the rules of
the configuration, the schedule, the engine (recompute/region_runner.py), the prediction of memory
(memory/) and the report read it. description/ names the operations of each region.
"""

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

CORE_ATTENTION, LAYERNORM, MLP_REGION = "core_attn", "layernorm", "mlp"
ACTIVATION, DROPOUT = "activation", "dropout"
MOE, MOE_ACTIVATION, SHARED_EXPERTS = "moe", "moe_act", "shared_experts"
UP_PROJECTION = "mla_up_proj"
ALIAS = "pointwise"
Method = Literal["replay", "discard", "redraw"]


class RegionFacts(NamedTuple):
    """One row of the table.

    method: how backward gets the region's results back.
        replay   The region keeps its inputs and the states of the random-number streams; backward
                 runs it again.
        discard  The region keeps its inputs. Operations that save its output store a recipe
                 instead, so the output is freed; backward runs the region again for them.
        redraw   The region keeps the state of the random-number stream; backward draws its mask
                 again.
    help: what the region holds, in a few words.
    parent: the region that contains this one; recomputing the parent recomputes this one too.
    skips_tail: whether a replay can leave out the region's last matmul, because backward does not
        read the region's output.
    needs: what a layer must have; otherwise the region frees nothing, or is not there.
        scores          Attention builds its scores. A flash kernel keeps none, and its backward
                        rebuilds them anyway.
        norms_before    A norm precedes attention and the MLP. No operation keeps the output of a
                        norm that follows them (--norm-position after).
        hidden_dropout  --hidden-dropout is above 0.
        experts         The layer has experts (--num-experts), and so no `mlp`.
        latents         Its attention is multi-latent, which runs matmuls.
    """

    method: Method
    help: str
    parent: str | None = None
    skips_tail: bool = False
    needs: str = ""


REGIONS = {
    CORE_ATTENTION: RegionFacts(
        "replay",
        "scores, softmax and their product with the values",
        skips_tail=True,
        needs="scores",
    ),
    LAYERNORM: RegionFacts("discard", "the two norms of a layer", needs="norms_before"),
    MLP_REGION: RegionFacts("replay", "the whole MLP", skips_tail=True),
    ACTIVATION: RegionFacts("discard", "the activation of the MLP", parent=MLP_REGION),
    DROPOUT: RegionFacts(
        "redraw", "the dropout masks of the residual stream", needs="hidden_dropout"
    ),
    MOE: RegionFacts(
        "replay", "router and experts, with the forward's choice", skips_tail=True, needs="experts"
    ),
    SHARED_EXPERTS: RegionFacts("replay", "the shared expert", parent=MOE, needs="experts"),
    MOE_ACTIVATION: RegionFacts(
        "discard", "the activation of the experts", parent=MOE, needs="experts"
    ),
    UP_PROJECTION: RegionFacts(
        "discard",
        "query, key and value from their latents, under --multi-latent-attention",
        needs="latents",
    ),
}
MODULES = tuple(REGIONS)
# The regions that run no matmul again. The name `pointwise` stands for all of them.
POINTWISE = tuple(
    name for name, facts in REGIONS.items() if facts.method != "replay" and facts.needs != "latents"
)


def expanded(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names with the alias `pointwise` replaced by its regions."""
    return tuple(region for name in names for region in (POINTWISE if name == ALIAS else (name,)))


def nested(regions: Collection[str]) -> list[tuple[str, str]]:
    """Returns (region, parent) for every region whose parent is among the regions."""
    return [
        (name, facts.parent)
        for name, facts in REGIONS.items()
        if name in regions and facts.parent and facts.parent in regions
    ]


def without_effect(regions: Iterable[str], *, builds_scores: bool) -> list[str]:
    """Returns the regions that free next to nothing.

    builds_scores: whether attention builds its scores.
    """
    return [region for region in regions if REGIONS[region].needs == "scores" and not builds_scores]


# By name: the module, by its name within the layer.
PARTS = {
    "attn_norm": "input_layernorm",
    "qkv_linear": "self_attention.linear_qkv",
    "core_attn": "self_attention.core_attention",
    "attn_proj": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "linear_fc1": "mlp.linear_fc1",
    "activation": "mlp",
    "linear_fc2": "mlp.linear_fc2",
}
MEGATRON_PARTS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
# A part whose only saved tensor is one that another part saves first, with that other part.
SAVED_WITH = {"attn_proj": "core_attn"}

# The parts that a layer lacks under --norm-position after.
NORM_PARTS = ("attn_norm", "mlp_norm")


def parts_of(store: str) -> tuple[str, ...]:
    """Returns the parts of "host(attn_norm+core_attn)"; () for a store that names no parts."""
    if not store.startswith("host("):
        return ()
    return tuple(store.removeprefix("host(").removesuffix(")").split("+"))


def store_of(parts: tuple[str, ...]) -> str:
    """Returns the store that keeps these parts in host memory, in its normal spelling."""
    return f"host({'+'.join(name for name in PARTS if name in parts)})"
