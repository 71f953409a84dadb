"""One transformer layer as the operators that `ops(...)` of a policy can name: in the order of the forward, with their results.

What a policy keeps of a layer, and what its replay runs again, follow from this list. It follows model/layer.py, attention.py,
mlp.py and the linears of tensor_parallel/ line by line, as layer_tensors.py does. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.operators import Choice
from megatron_lite.memory.layer_tensors import KeptTensor, LayerTensors, Sizes, layer_tensors

FC2, CORE = "linear_fc2", "core_attention"
CONTEXT_PARALLEL_ATTENTION = "megatron_lite.context_parallel_attention.default"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
COLLECTIVES = {"_c10d_functional.all_reduce.default": ALL_REDUCE, "_c10d_functional.all_gather_into_tensor.default": ALL_GATHER,
               "_c10d_functional.reduce_scatter_tensor.default": REDUCE_SCATTER}


class Result(NamedTuple):
    """operator: as torch names it; "" where none may be kept. operation: who runs it, in the words of layer_tensors.py.
    matmuls: what it computes, in the words of flops.LayerFlops. tensors: its results; where another operation keeps the same
    storage, by the same name."""

    operator: str
    operation: str
    matmuls: tuple[str, ...]
    tensors: tuple[KeptTensor, ...]


def layer_results(model: ModelConfig, sizes: Sizes) -> Iterator[Result]:
    """All matmuls, attention kernels and collectives of one layer."""
    hidden = sizes.tokens * model.hidden_size * sizes.element_bytes  # [s, b, h]
    layer = layer_tensors(model, sizes)
    tokens = sizes.tokens // sizes.tp_size * sizes.element_bytes
    qkv = tokens * (model.num_attention_heads + 2 * model.query_groups) * model.head_dim
    fc1 = tokens * model.ffn_size * (2 if model.activation == "swiglu" else 1)
    bias = model.add_bias_linear
    yield from _column("linear_qkv", "qkv", KeptTensor("query, key and value", qkv), bias or model.add_qkv_bias, hidden, sizes)
    yield from _core(model, layer, sizes)
    yield from _row("linear_proj", "projection", bias, hidden, sizes)
    yield from _column("linear_fc1", "fc1", KeptTensor("fc1 output", fc1), bias, hidden, sizes)
    yield from _row(FC2, "fc2", bias, hidden, sizes)


def kept_results(model: ModelConfig, ops: Sequence[str], sizes: Sizes, *, skip_tail: bool) -> list[Result]:
    """Those of one layer that are kept."""
    choice = Choice(ops)
    return [result for result in layer_results(model, sizes)
            if choice.keeps(result.operator) and not (skip_tail and result.operation == FC2)]


def repeated_results(model: ModelConfig, ops: Sequence[str], sizes: Sizes, *, skip_tail: bool) -> list[Result]:
    """Those of one layer whose operators run again."""
    choice = Choice(ops)
    return [result for result in layer_results(model, sizes)
            if not choice.keeps(result.operator) and not (skip_tail and result.operation == FC2)]


def _column(name: str, matmul: str, output: KeptTensor, bias: bool, hidden: int, sizes: Sizes) -> Iterator[Result]:
    if sizes.tp_size > 1 and sizes.sequence_parallel:
        yield Result(_collective(ALL_GATHER), name, (), (KeptTensor(f"gathered input of {name}", hidden),))
    yield Result(_linear(bias), name, (matmul,), (output,))


def _row(name: str, matmul: str, bias: bool, hidden: int, sizes: Sizes) -> Iterator[Result]:
    if sizes.tp_size == 1:
        yield Result(_linear(bias), name, (matmul,), (KeptTensor(f"{name} output", hidden),))
        return
    yield Result(_linear(False), name, (matmul,), (KeptTensor(f"partial {name} output", hidden),))  # the bias comes after the sum
    summed = KeptTensor(f"{name} output", hidden)
    if sizes.sequence_parallel:
        yield Result(_collective(REDUCE_SCATTER), name, (), (summed._replace(num_bytes=hidden // sizes.tp_size),))
    else:
        yield Result(_collective(ALL_REDUCE), name, (), (summed,))


def _linear(bias: bool) -> str:
    return "aten.addmm.default" if bias else "aten.mm.default"


def _collective(kind: str) -> str:
    return next(operator for operator, name in COLLECTIVES.items() if name == kind)


def _core(model: ModelConfig, layer: LayerTensors, sizes: Sizes) -> Iterator[Result]:
    kept = {tensor.name: tensor for operation in layer.operations for tensor in operation.keeps}
    if model.builds_scores(sizes.device):
        heads = sizes.micro_batch_size * model.num_attention_heads // sizes.tp_size
        scores = heads * sizes.seq_length * sizes.own_seq_length * sizes.element_bytes
        if sizes.cp_size > 1:
            kv = 2 * sizes.micro_batch_size * sizes.seq_length * model.query_groups * model.head_dim // sizes.tp_size
            yield Result(_collective(ALL_GATHER), CORE, (), (KeptTensor("gathered key and value", kv * sizes.element_bytes),))
        yield Result("aten.baddbmm.default", CORE, ("scores",), (KeptTensor("scores", scores),))
        yield Result("aten.bmm.default", CORE, ("context",),
                     (kept["attention output"]._replace(name="attention output by head"),))
    else:
        kernel = "flash_attention" if sizes.device == "cuda" else "flash_attention_for_cpu"
        operator = f"aten._scaled_dot_product_{kernel}.default" if sizes.cp_size == 1 else CONTEXT_PARALLEL_ATTENTION
        yield Result("" if model.attention_dropout > 0.0 else operator, CORE, ("scores", "context"),
                     (kept["attention output"], kept["log-sum-exp"]))
