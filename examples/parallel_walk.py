"""Shows how five kinds of parallelism split one training step over two ranks.

    torchrun --standalone --nproc_per_node 2 examples/parallel_walk.py

For each kind it trains one step of the same small model, and prints the shapes that each rank sees:
of the embedding, and of the activations and weights of its first layer. It ends with the
loss, which is the same every time. docs/parallelism.md explains the output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import parse_args
from megatron_lite.parallel.collectives import gather_values
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 1 --log-interval 1 --lr 1e-3 --eval-iters 0 --mock-data --vocab-size 127 "
    "--make-vocab-size-divisible-by 1 --distributed-backend gloo --seed 1"
)
KINDS = {
    "data parallelism": "",
    "tensor parallelism": "--tensor-model-parallel-size 2",
    "tensor, sequence parallelism": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context parallelism": "--context-parallel-size 2",
    "pipeline parallelism": "--pipeline-model-parallel-size 2",
}
MODULES = {
    "word_embeddings": "embedding",
    "input_layernorm": "norm",
    "linear_qkv": "linear_qkv",
    "core_attention": "core attention",
    "linear_proj": "linear_proj",
    "linear_fc1": "linear_fc1",
    "linear_fc2": "linear_fc2",
}


def main() -> None:
    """Walks through the kinds, and prints on rank 0."""
    dist.init_process_group("gloo")
    for kind, flags in KINDS.items():
        lines, loss = one_step(flags.split())
        shapes = everywhere("\n".join(lines))
        if dist.get_rank() == 0:
            print(f"{kind}: {flags or 'no flag'}")
            row(*(f"{f'rank {rank}':15s}{'output':13s}weight" for rank in range(2)))
            for left, right in zip_longest(*(text.splitlines() for text in shapes), fillvalue=""):
                row(left, right)
            print(f"  loss {loss:.4f}\n")
    dist.destroy_process_group()


def row(left: str, right: str) -> None:
    """Prints a line of both ranks."""
    print(f"  {left:39s}{right}".rstrip())


def everywhere(text: str) -> list[str]:
    """Returns the text of every rank."""
    return gather_values(text, dist.group.WORLD)


def one_step(flags: list[str]) -> tuple[list[str], float]:
    """Trains one step. Returns what this rank has seen, and on rank 0 the loss."""
    seen: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        metrics = Path(folder, "metrics.jsonl")
        config = parse_args([*MODEL.split(), *flags, "--metrics-jsonl", str(metrics)]).config
        with parallel_state(config.parallel, seed=config.training.seed, run=config) as parallel:
            trainer = build_trainer(config, parallel)
            watch(trainer.model, seen)
            trainer.run()
        if dist.get_rank() > 0:
            return seen, 0.0
        return seen, json.loads(metrics.read_text())["lm_loss"]


def watch(model: nn.Module, seen: list[str]) -> None:
    """Notes the shapes of the first forward of a model's first layer."""
    first = next(
        (name for name, _ in model.named_modules() if name.endswith(".input_layernorm")), ""
    ).removesuffix("input_layernorm")

    layers = {
        int(found[1])
        for path, _ in model.named_modules()
        if (found := re.search(r"layers\.(\d+)\.", path))
    }
    seen.append(f"{'layers':15s}{min(layers)} to {max(layers)}")

    def note(name: str, weight: Tensor | None, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and not any(line.startswith(f"{name} ") for line in seen):
            shape = f"{list(weight.shape)}" if weight is not None else ""
            seen.append(f"{name:15s}{list(tensor.shape)!s:13s}{shape}".rstrip())

    for path, module in model.named_modules():
        short = path.rpartition(".")[2]
        inside = path.startswith(first) or short == "word_embeddings"
        name = MODULES.get(short) if inside else None
        if name is not None:
            weight = getattr(module, "weight", None) if name != "norm" else None

            def hook(
                _: nn.Module,
                inputs: object,
                output: object,
                name: str = name,
                weight: Tensor | None = weight,
            ) -> None:
                note(name, weight, output)

            module.register_forward_hook(hook)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
    sys.stdout.flush()
    # Groups that were destroyed long ago leave threads of gloo, which can abort the process when
    # the interpreter ends.
    os._exit(0)
