"""Writes what this checkout computes, for a comparison with another checkout on the same machine.

    python tests/golden.py --output before          (in the commit before a change)
    python tests/golden.py --output after           (in the commit after it)
    diff -r before after                            (empty: the change altered no result)

The folder gets one file for each case. A file of `explain` holds the report of --explain-recompute:
bytes, FLOPs, collectives and parameters. A file of `train` holds the losses, norms and bytes of the
metrics file without its times, and the SHA-256 of each tensor file of the checkpoint. Losses depend
on the machine's kernels, so the files are not kept in the repository.

--root names the checkout that runs; without it, it is the one that this script lies in. So a new
version of the script can drive an old checkout.
"""

import argparse
import hashlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --vocab-size 101 "
    "--make-vocab-size-divisible-by 8"
)
TRAIN = (
    "--global-batch-size 8 --train-iters 3 --lr 1e-3 --mock-data --log-interval 1 "
    "--eval-interval 3 --eval-iters 1 --save-interval 3 --seed 7"
)
MODELS = {
    "gpt": "",
    "no-dropout": "--hidden-dropout 0 --attention-dropout 0",
    "unfused": "--attention-backend unfused --attention-softmax-in-fp32",
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0",
    "qwen": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--add-qkv-bias --qk-layernorm --rotary-percent 0.5 --hidden-dropout 0 "
    "--attention-dropout 0",
    "relu": "--squared-relu --position-embedding-type none --attention-dropout 0",
}
POLICIES = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "every-region": "--recompute-granularity selective --recompute-modules core_attn mlp layernorm "
    "activation dropout",
    "pointwise": "--recompute-granularity selective --recompute-modules pointwise",
    "mlp": "--recompute-granularity selective --recompute-modules mlp",
    "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "mixed": (
        "--recompute-policy '0:full@host; 1:ops(matmul/2,attention); 2:core_attn+layernorm@host'"
    ),
    "host": "--recompute-policy '*:core_attn+layernorm@host'",
    "ops": "--recompute-policy '*:ops(attention,collective)'",
    "whole-tail": (
        "--recompute-granularity full --recompute-method uniform --no-recompute-tail-skip"
    ),
}
SPLIT = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
    "--distribute-saved-activations"
)
PRECISIONS = {"float32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 65536"}
# Each layout: the number of ranks and its flags.
LAYOUTS = {
    "tp1": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "vp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "cp2": (2, "--context-parallel-size 2"),
    "dp2-zero1": (2, "--use-distributed-optimizer"),
    "dp2-fsdp2": (2, "--use-torch-fsdp2"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="the checkout that runs",
    )
    parser.add_argument("--only", choices=tuple(KINDS), help="leave the other kinds out")
    chosen = parser.parse_args()
    for kind, cases in KINDS.items():
        if chosen.only in (None, kind):
            folder = chosen.output / kind
            folder.mkdir(parents=True, exist_ok=True)
            for name, ranks, flags in cases():
                print(kind, name, flush=True)
                run = explained if kind == "explain" else trained
                (folder / f"{name}.txt").write_text(run(chosen.root, ranks, flags))
    return 0


def explain_cases():
    """Yields the name, the number of ranks and the flags of every model with every policy and
    layout."""
    batch = "--global-batch-size 8"
    for (model, sizes), (policy, recompute) in itertools.product(MODELS.items(), POLICIES.items()):
        for layout, (ranks, parallel) in LAYOUTS.items():
            if layout == "cp2" and "dropout" not in sizes:
                continue  # attention dropout under context parallelism needs another backend
            for backend in ("gloo", "nccl"):
                flags = (
                    f"{TINY} {sizes} {recompute} {parallel} --distributed-backend {backend} {batch}"
                )
                yield f"{model}_{policy}_{layout}_{backend}", ranks, flags
    for model, precision in itertools.product(MODELS, PRECISIONS):
        flags = (
            f"{TINY} {MODELS[model]} {SPLIT} {PRECISIONS[precision]} {LAYOUTS['tp2'][1]} {batch}"
        )
        yield f"{model}_split_{precision}", 2, flags


def train_cases():
    """Yields the name, the number of ranks and the flags of the runs that are trained."""
    for model, policy in itertools.product(("gpt", "qwen"), POLICIES):
        yield f"{model}_{policy}_tp1", 1, f"{TINY} {MODELS[model]} {POLICIES[policy]} {TRAIN}"
    for model in ("unfused", "llama", "relu"):
        yield f"{model}_mixed_tp1", 1, f"{TINY} {MODELS[model]} {POLICIES['mixed']} {TRAIN}"
    for layout, (ranks, parallel) in LAYOUTS.items():
        if ranks > 1:
            for policy in ("host" if "pipeline" in parallel else "mixed", "every-region"):
                flags = f"{TINY} {MODELS['qwen']} {POLICIES[policy]} {parallel} {TRAIN}"
                yield f"qwen_{policy}_{layout}", ranks, flags
    yield "gpt_split_bf16_tp2", 2, f"{TINY} {SPLIT} --bf16 {LAYOUTS['tp2'][1]} {TRAIN}"
    yield (
        "llama_chunks_bf16_tp1",
        1,
        f"{TINY} {MODELS['llama']} --bf16 --loss-chunk-size 16 {TRAIN}",
    )


def explained(root, ranks, flags):
    """Returns the report of --explain-recompute, or the refusal."""
    return _run(root, 1, f"{flags} --explain-recompute", cwd=root)


def trained(root, ranks, flags):
    """Returns the metrics without times, and the checksums of the checkpoint's tensors."""
    with tempfile.TemporaryDirectory() as folder:
        output = _run(
            root, ranks, f"{flags} --metrics-jsonl metrics.jsonl --save saved", cwd=Path(folder)
        )
        metrics = Path(folder, "metrics.jsonl")
        if not metrics.exists():
            return output
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        lines = [
            json.dumps(
                {
                    name: value
                    for name, value in row.items()
                    if not name.endswith(("_ms", "per_second", "tflops", "mfu", "hfu"))
                }
            )
            for row in rows
        ]
        for path in sorted(Path(folder, "saved").rglob("*.safetensors")):
            lines.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
        return "\n".join(lines) + "\n"


def _run(root, ranks, flags, *, cwd):
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher = [sys.executable, *(several if ranks > 1 else ())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*launcher, str(root / "pretrain_gpt.py"), *shlex.split(flags)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}\n{done.stderr}"


KINDS = {"explain": explain_cases, "train": train_cases}

if __name__ == "__main__":
    sys.exit(main())
