"""Draws one layer: its operations, its regions, and what each policy keeps of it.

The picture is made of the description of a layer (megatron_lite/description/), so it is what the
predictions of memory count.
"""

import itertools
from collections import Counter

from megatron_lite.config.regions import POINTWISE, REGIONS
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.memory.predict.kept_tensors import calls_of_ops, layer_terms

COLORS = {  # of the regions: Paul Tol's "bright" scheme
    "layernorm": "#4477AA",
    "core_attn": "#AA3377",
    "mlp": "#CCBB44",
    "activation": "#228833",
    "dropout": "#EE6677",
}
POLICIES = ("none", "pointwise", "mlp", "ops(matmul,attention)", "full")


def kept_by(layer, policy, sizes):
    """Returns the bytes that are kept, by the operation beside which the picture shows them."""
    kept = Counter()
    if policy == "full" or policy.startswith("ops("):
        kept[layer.operations[0].name] = layer.input.num_bytes
        if policy != "full":
            names = policy.removeprefix("ops(").removesuffix(")").split(",")
            for operation, call in calls_of_ops(layer, names, skip_tail=True, kept=True):
                kept[operation.name] = sum(tensor.num_bytes for tensor in call.returns)
        return kept
    regions = {"none": (), "pointwise": POINTWISE}.get(policy, (policy,))
    places = {tensor.name: one.name for one in reversed(layer.operations) for tensor in one.keeps}
    for term in layer_terms(layer.operations, 0, frozenset(regions), sizes):
        if not term.tensor.stays:
            kept[places.get(term.tensor.name, term.operation)] += term.num_bytes
    return kept


def layer_figure(config):
    """Returns the picture of the first layer of a run on GPUs."""
    from matplotlib import pyplot

    sizes = Sizes.of(config, device="cuda")
    layer = describe_layer(sizes)
    rows = [one for one in layer.operations if one.keeps or one.regions or one.calls]
    kept = {policy: kept_by(layer, policy, sizes) for policy in POLICIES}
    most = max(max(column.values()) for column in kept.values()) / 2**20
    figure, axes = pyplot.subplots(
        1, len(POLICIES) + 1, sharey=True, figsize=(9.2, 5), layout="constrained"
    )
    axes[0].set_yticks(range(len(rows)), [one.name.replace("_", " ") for one in rows])
    axes[0].invert_yaxis()
    outermost_first = sorted(COLORS, key=lambda name: REGIONS[name].parent is not None)
    for number, (row, region) in itertools.product(range(len(rows)), enumerate(outermost_first)):
        if region in rows[number].regions:
            axes[0].barh(number, 0.8, left=row, height=1, color=COLORS[region], align="center")
    names = [place + 0.4 for place in range(len(COLORS))]
    axes[0].set_xticks(names, outermost_first, rotation=60, ha="left")
    for axis, policy in zip(axes[1:], POLICIES, strict=True):
        mib = [kept[policy][one.name] / 2**20 for one in rows]
        bars = axis.barh(range(len(rows)), mib)
        axis.bar_label(bars, [f"{size:.1f}" if size else "" for size in mib], padding=2)
        axis.set_title(f"{policy}\nkeeps {sum(mib):.1f} MiB", fontsize=9)
        axis.set(xticks=[], xlim=(0, 1.4 * most))
    for axis in axes:
        axis.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axis.spines[:].set_visible(False)
    figure.supxlabel(
        f"MiB on one GPU: hidden size {config.model.hidden_size:,}, s {config.data.seq_length}, "
        f"b {config.training.micro_batch_size}, tensor- and sequence-parallel {sizes.tp_size}, "
        "bf16, hidden dropout 0.1, flash attention.\n"
        "A bar stands at the first operation that keeps the tensor.",
        fontsize=8,
    )
    pyplot.close(figure)
    return figure
