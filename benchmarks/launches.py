"""Counts the kernels of a training step and the bytes that pointwise kernels move, without a GPU.

    python -m benchmarks.launches [FLAGS of the run]

The step is that of the gpt2 shape (12 x 768, s 1024, b 8, V 50304, bf16, dropout 0.1), one
micro-batch, by torch's operators and under --torch-compile. It runs on tensors without values, on
a stand-in for a GPU (tests/support/stand_in_device.py). An operator that is no view is one launch,
and attention is one launch of its flash kernel each way. A compiled graph has as many launches as
its scheduler has groups of fused operations. They are those for a CPU. A GPU splits the sum over
the rows of a tall matrix into two kernels, and joins results whose loops have other shapes, such as
dropout's mask and its sum. Bytes are what a launch reads and writes once; those of matrix products
and attention are left out.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from arguments import parse_args
from megatron_lite.parallel import weight_gradient
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.parallel.torch_internals import disable_current_modes, fake_mode_of
from megatron_lite.tensor_parallel import layers
from megatron_lite.training import build_trainer
from megatron_lite.training.step import train_step
from tests.support.dispatch import Dispatches, tensors_in
from tests.support.stand_in_device import ALLOCATIONS, _is_view, step_on_the_device

GPT2 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 8 "
    "--vocab-size 50257 --bf16 --mock-data --lr 1e-4 --train-iters 1"
)
MATMULS = ("mm", "addmm", "bmm", "baddbmm")
NO_KERNEL = ("set_", "detach", "_unsafe_view", "promote_types", "scalar_tensor")
BY_INDEX = ("gather", "scatter_add_", "embedding")  # they move what the indices name


class Launches(Dispatches):
    """Counts launches and bytes by kind: "matmul", "attention", or the name of the operator."""

    def __init__(self):
        super().__init__()
        self.launches = Counter()
        self.num_bytes = Counter()
        self.part = ""

    def add(self, name, launches, num_bytes):
        self.launches[f"{self.part}: {name}"] += launches
        self.num_bytes[f"{self.part}: {name}"] += num_bytes

    def saw(self, func, args, kwargs, results):
        name = func._schema.name.partition("::")[2]
        if _is_view(func) or name in ALLOCATIONS or name in NO_KERNEL:
            return
        if name in MATMULS or "attention" in name:
            self.add("matmul" if name in MATMULS else "attention", 1, 0)
            return
        moved = {id(one): _nbytes(one) for one in tensors_in((args, kwargs))}
        written = tensors_in(results)
        moved |= {id(one): _nbytes(one) * (1 + (id(one) in moved)) for one in written}
        if name in BY_INDEX:
            least = min(_nbytes(one) for one in tensors_in((args, kwargs, results)))
            moved = {0: 2 * (_nbytes(written[0]) if name == "embedding" else least)}
        elif name in ("zero_", "fill_", "copy_", "random_"):  # they do not read what they write
            moved[id(args[0])] = _nbytes(args[0])
        self.add(name, 1, sum(moved.values()))


def _nbytes(tensor):
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


@cache
def fused_groups(function, layouts, **constants):
    """Returns the number of kernels that inductor makes of a function, and the bytes they move.

    layouts: shape, strides and dtype of each tensor that it takes.
    """
    import torch._inductor.config as settings
    from torch._inductor.scheduler import Scheduler
    from torch.fx.experimental.proxy_tensor import make_fx

    found = [0, 0]
    generate = Scheduler.codegen

    def counted(scheduler):
        nodes = [
            node for node in scheduler.nodes if type(node).__name__ != "NopKernelSchedulerNode"
        ]
        found[0] += len(nodes)
        found[1] += sum(node.get_read_write_buffers_sizes() for node in nodes)
        generate(scheduler)

    with (
        disable_current_modes(),
        torch.no_grad(),
        mock.patch.object(Scheduler, "codegen", counted),
        settings.patch(force_disable_caches=True, force_pointwise_cat=True),
    ):
        cpu = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in layouts]
        pure = torch.func.functionalize(partial(function, **constants), remove="mutations")
        graph = make_fx(pure, tracing_mode="fake")(*cpu)
        torch._inductor.compile(graph, cpu)
    return found[0], found[1]


class CountedKernels(CompiledKernels):
    """Compiled kernels that are counted and not run."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __call__(self, function, *tensors, **constants):
        layouts = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
        found = fused_groups(function, layouts, **constants)
        self.counts.add(f"graph of {name_of(function)}", *found)
        with disable_current_modes(), fake_mode_of(tensors[0]):
            return function(*tensors, **constants)


def name_of(function):
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    named = [one for one in inner if callable(one)]
    return name_of(named[0]) if named else function.__name__


def flash(query, key, value, **settings):
    """Returns attention by CUDA's flash kernel, which has a form without values."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, settings["dropout_p"], True
    )
    return found[0]


def count(config):
    """Returns the launches and the bytes of a step, by part and kind."""
    counts = Launches()

    def counted_product(*_, first):  # addmm, which has no form without values
        counts.add("matmul", 1, 0)

    def timed(name):
        counts.part = name if name == "optimizer" else counts.part
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", flash)
        for module in (weight_gradient, layers):
            patch.setattr(module, "adds_unrounded", lambda device, dtype: True)
        patch.setattr(weight_gradient, "add_weight_product_", counted_product)
        patch.setattr(build_trainer, "CompiledKernels", lambda: CountedKernels(counts))
        with step_on_the_device(config, patch, rank=0, world_size=1) as step:
            step.runner.timed = timed
            counts.part = "forward and backward"
            with counts:
                train_step(step.runner, step.optimizer, step.batches, learning_rate=1e-6)
    return counts


def main():
    for flags in ("--no-torch-compile", "--torch-compile"):
        found = count(parse_args(f"{GPT2} {' '.join(sys.argv[1:])} {flags}".split()).config)
        print(flags)
        for part in ("forward and backward", "optimizer"):
            rows = {name: n for name, n in found.launches.items() if name.startswith(part)}
            total = sum(found.num_bytes[name] for name in rows)
            print(f"  {part}: {sum(rows.values())} launches, {total / 1e9:.2f} GB pointwise")
            for name, number in sorted(rows.items(), key=lambda row: -row[1]):
                gigabytes = found.num_bytes[name] / 1e9
                print(f"    {number:5d} {gigabytes:8.2f} GB  {name.partition(': ')[2]}")


if __name__ == "__main__":
    main()
