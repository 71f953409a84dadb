"""Draws one layer: its operations, its regions, and what each policy keeps of it.

The picture is made of the description of a layer (megatron_lite/description/), so it is what the
predictions of memory count. It is an SVG for light and dark pages.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.regions import POINTWISE, REGIONS
from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import LayerDescription
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.memory.predict.kept_tensors import layer_terms
from megatron_lite.memory.predict.replays import kept_calls

COLORS = {  # of the regions: Paul Tol's "bright" scheme
    "layernorm": "#4477AA",
    "core_attn": "#AA3377",
    "mlp": "#CCBB44",
    "activation": "#228833",
    "dropout": "#EE6677",
}
POLICIES = ("none", "pointwise", "mlp", "ops(matmul,attention)", "full")
ROW, TOP, LEFT, NAMES = 30, 92, 226, 96
COLUMNS = (152, 152, 152, 184, 100)  # the widths of the policies' columns
BAR = 94  # the width of the largest bar
STYLE = """<style>
text { font: 13px sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
.line { stroke: #d1d9e0 } .bar { fill: #4477AA } .head { font: 12px monospace }
@media (prefers-color-scheme: dark) { text { fill: #d1d7e0 } .small { fill: #9198a1 }
.line { stroke: #3d444d } .bar { fill: #66A3D9 } }
</style>"""


class Kept(NamedTuple):
    """What a policy keeps at an operation: the names of tensors and their bytes."""

    names: tuple[str, ...]
    num_bytes: int


def kept_by(layer: LayerDescription, policy: str, sizes: Sizes) -> dict[str, Kept]:
    """Returns what is kept of one layer, by the operation beside which the picture shows it."""
    if policy == "full":
        return {layer.operations[0].name: Kept((layer.input.name,), layer.input.num_bytes)}
    if policy.startswith("ops("):
        names = policy.removeprefix("ops(").removesuffix(")").split(",")
        found = {layer.operations[0].name: Kept((layer.input.name,), layer.input.num_bytes)}
        for operation, call in kept_calls(layer, names, skip_tail=True):
            tensors = tuple(tensor.name for tensor in call.returns)
            found[operation.name] = Kept(tensors, sum(tensor.num_bytes for tensor in call.returns))
        return found
    regions = {"none": (), "pointwise": POINTWISE}.get(policy, (policy,))
    kept: dict[str, Kept] = {}
    places = {(tensor.name): one.name for one in reversed(layer.operations) for tensor in one.keeps}
    for term in layer_terms(layer.operations, 0, frozenset(regions), sizes):
        if term.num_bytes and not term.tensor.stays:
            place = places.get(term.tensor.name, term.operation)
            before = kept.get(place, Kept((), 0))
            names = (*before.names, term.tensor.name)
            kept[place] = Kept(names, before.num_bytes + term.num_bytes)
    return kept


def layer_svg(config: RunConfig) -> str:
    """Returns the picture of the first layer of a run on GPUs."""
    sizes = Sizes.of(config, device="cuda")
    layer = describe_layer(config.model, sizes)
    rows = [one for one in layer.operations if one.keeps or one.regions or one.calls]
    columns = {policy: kept_by(layer, policy, sizes) for policy in POLICIES}
    most = max(kept.num_bytes for column in columns.values() for kept in column.values())
    width, height = LEFT + sum(COLUMNS) + 10, TOP + ROW * len(rows) + 62
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>One layer: its operations and regions, and what each policy keeps of it</title>",
        STYLE,
        f'<text x="{NAMES + 12}" y="24">operation</text>',
        '<text x="6" y="24">regions</text>',
    ]
    outermost_first = sorted(REGIONS, key=lambda name: REGIONS[name].parent is not None)
    for number, region in enumerate(outermost_first):
        out += _region(region, 8 + 17 * number, [region in one.regions for one in rows])
    for number, one in enumerate(rows):
        y = TOP + ROW * number
        out.append(f'<line class="line" x1="{NAMES}" x2="{width - 8}" y1="{y}" y2="{y}"/>')
        out.append(f'<text x="{NAMES + 12}" y="{y + 20}">{one.name.replace("_", " ")}</text>')
    for number, (policy, column) in enumerate(columns.items()):
        x = LEFT + sum(COLUMNS[:number])
        total = sum(kept.num_bytes for kept in column.values())
        out.append(f'<text class="head" x="{x}" y="24">{policy}</text>')
        out.append(f'<text class="small" x="{x}" y="42">keeps {total / 2**20:.1f} MiB</text>')
        for place, one in enumerate(rows):
            kept = column.get(one.name)
            if kept is not None:
                y, length = TOP + ROW * place, BAR * kept.num_bytes / most
                size = f"{kept.num_bytes / 2**20:.1f}"
                out.append(
                    f'<rect class="bar" x="{x}" y="{y + 8}" width="{max(length, 1):.1f}"'
                    f' height="14" rx="2"><title>{", ".join(kept.names)}</title></rect>'
                    f'<text class="small" x="{x + length + 5:.1f}" y="{y + 19}">{size}</text>'
                )
    tokens = f"s {config.data.seq_length}, b {config.training.micro_batch_size}"
    for y, text in (
        (
            height - 30,
            f"MiB on one GPU: hidden size {config.model.hidden_size:,}, {tokens}, tensor- and "
            f"sequence-parallel {sizes.tp_size}, bf16, hidden dropout 0.1, flash attention.",
        ),
        (height - 14, "A bar stands at the first operation that keeps the tensor."),
    ):
        out.append(f'<text class="small" x="{NAMES + 12}" y="{y}">{text}</text>')
    return "\n".join([*out, "</svg>", ""])


def _region(name: str, x: int, inside: list[bool]) -> list[str]:
    """Returns a bar beside each stretch of rows that lie in the region, and the region's name."""
    out = []
    stretches: list[list[int]] = []
    for number, one in enumerate(inside):
        if one and (number == 0 or not inside[number - 1]):
            stretches.append([])
        if one:
            stretches[-1].append(number)
    for rows in stretches:
        y, length = TOP + ROW * rows[0] + 3, ROW * len(rows) - 6
        out.append(
            f'<rect x="{x}" y="{y}" width="9" height="{length}" rx="4" fill="{COLORS[name]}">'
            f"<title>{name}</title></rect>"
        )
    middle = TOP - 6
    out.append(
        f'<text class="small" transform="translate({x + 8} {middle}) rotate(-60)" '
        f'style="font-size: 11px">{name}</text>'
    )
    return out
