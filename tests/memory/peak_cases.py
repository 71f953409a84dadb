"""Runs whose whole peak is predicted, and measured in a real training step on the CPU.

Each case is a run of two steps over 1 to 4 gloo ranks. Measured is the most that torch's CPU
allocator had at once in the second step (tests/memory/step_peaks.py).
`pytest tests/memory/test_step_peak.py` compares both.
"""

from typing import NamedTuple

from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.observe import own_step_peak
from tests.memory.step_peaks import measure
from tests.support.commands import parsed_line
from tests.support.ranks import run_ranks

# The settings beyond those that test_step_peak.py draws at random.
# V / h = 32, and as many tokens in a sequence as channels.
SIZES = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --vocab-size 4095 "
    "--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 --mock-data "
    "--lr 1e-3 --train-iters 2 --eval-iters 0 --distributed-backend gloo"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
CHUNKS = "--loss-chunk-size 64"
UNTIED = "--untie-embeddings-and-output-weights"
OWN_UNITS = "--fsdp-memory-efficient-wrapping"
# The fullest moment is in a layer.
SMALL = "--vocab-size 255"
NARROW = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
NARROW_SUMS = f"{NARROW} --main-grads-dtype bf16"
TP, SEQUENCE = "--tensor-model-parallel-size 2", "--sequence-parallel"
PP, VIRTUAL = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank 2"
CP, FSDP, ZERO1 = "--context-parallel-size 2", "--use-torch-fsdp2", "--use-distributed-optimizer"
INSTANCES = "--num-distributed-optimizer-instances 2"
# The fullest moment is the update, or near it.
FEW_TOKENS = (
    "--num-layers 2 --hidden-size 512 --seq-length 16 --micro-batch-size 1 --vocab-size 255"
)


class Case(NamedTuple):
    """A row of the table. flags: on top of SIZES. micro_batches: those of a rank in a step."""

    name: str
    flags: str
    ranks: int = 1
    micro_batches: int = 2

    @property
    def config(self):
        """The run of the row."""
        config = parsed_line(f"{SIZES} {self.flags}").config
        data_parallel_size = config.parallel.data_parallel_size(self.ranks)
        batch = self.micro_batches * config.training.micro_batch_size * data_parallel_size
        return config.with_fields({"global_batch_size": batch})


def policy(text):
    """Returns the flag of a recompute policy."""
    return f"--recompute-policy {text}"


CASES = (
    Case("nothing rebuilt", ""),
    Case("a padded vocabulary", "--vocab-size 4001"),
    Case("full/3, dropout", f"{CHUNKS} {DROPOUT} {policy('*:full/3')}"),
    Case("some layers", f"{CHUNKS} {policy('0-1:full/2;2:mlp;3:none')}"),
    Case(
        "parts on the host, llama",
        f"{SMALL} {LLAMA} {policy('0:none@host;*:none@host(attn_norm+linear_fc1)')}",
    ),
    Case("full/1, contiguous", f"{CHUNKS} {policy('*:full/1')} --contiguous-saved-activations"),
    Case("small vocabulary, ops(matmul/2)", f"{SMALL} {policy('*:ops(matmul/2)')}"),
    Case("small vocabulary, verified", f"{SMALL} {policy('*:mlp')} --recompute-verify"),
    Case(
        "small vocabulary, windows",
        f"{SMALL} --window-size 32,0 --window-attn-skip-freq 2 {policy('*:full/1')}",
    ),
    Case("few tokens, muon", f"{FEW_TOKENS} --optimizer muon"),
    Case(
        "few tokens, muon, qkv is the largest",
        f"{FEW_TOKENS} --ffn-hidden-size 256 --optimizer muon",
    ),
    Case("few tokens, AdamW", FEW_TOKENS),
    Case("loss chunks of 512 tokens by default", "--micro-batch-size 5"),
    Case("sums in bf16, untied, chunks", f"{NARROW_SUMS} {UNTIED} {CHUNKS}"),
    Case("sums in bf16, tied", f"{NARROW_SUMS} --vocab-size 20000"),
    Case("few tokens, sums in bf16", f"{FEW_TOKENS} {NARROW_SUMS} --exp-avg-sq-dtype fp16"),
    Case(
        "few tokens, rounded to either neighbour",
        f"{FEW_TOKENS} {NARROW} --main-params-dtype fp16 --stochastic-rounding",
    ),
    Case("TP 2, full/2@split", f"{TP} {CHUNKS} {policy('*:full/2@split')}", 2),
    Case("TP 2, full/1@split+host", f"{TP} {CHUNKS} {policy('*:full/1@split+host')}", 2),
    Case("PP 2, 2 virtual stages, mlp", f"{PP} {VIRTUAL} {policy('*:mlp')}", 2, 4),
    Case("PP 2, empty stages", f"{PP} --pipeline-model-parallel-layout E|t*3|t|L", 2, 4),
    Case("DP 2, ZeRO-1, bf16, overlap", f"{ZERO1} --bf16 --overlap-grad-reduce", 2),
    Case("DP 2, gradients sent in bf16", f"{FEW_TOKENS} --bf16 --grad-reduce-in-bf16", 2),
    Case(
        "FSDP 2, 1 micro-batch, a dense layer before those of experts",
        f"{FSDP} --num-experts 4 --moe-layer-freq [0]+[1]*3",
        2,
        1,
    ),
    Case("FSDP 4, 2 instances", f"{FSDP} {INSTANCES}", 4),
    Case("DP 4, ZeRO-1, 2 instances", f"{FEW_TOKENS} {ZERO1} {INSTANCES} --bf16", 4),
    Case("FSDP 2, no reshard", f"{FSDP} --torch-fsdp2-no-reshard-after-forward", 2),
    Case(
        "FSDP 2, own units, untied, full/1",
        f"{FSDP} {OWN_UNITS} {UNTIED} {CHUNKS} {policy('*:full/1')}",
        2,
    ),
    Case("few tokens, muon, ZeRO-1", f"{FEW_TOKENS} {ZERO1} --optimizer muon", 2),
    Case(
        "few tokens, muon with Nesterov, ZeRO-1",
        f"{FEW_TOKENS} {ZERO1} --optimizer muon --muon-nesterov",
        2,
    ),
    Case("CP 2, all-gather", f"{CP} {CHUNKS} --cp-comm-type allgather {policy('*:full/1')}", 2),
    Case("CP 2, small vocabulary", f"{CP} {SMALL} --cp-comm-type allgather", 2),
    Case("CP 2, unfused, ZeRO-1", f"{CP} {CHUNKS} {ZERO1} --attention-backend unfused", 2),
)


class Row(NamedTuple):
    """What one rank of a case needs. moment: when the prediction reaches the peak."""

    predicted_bytes: int
    measured_bytes: int
    moment: str

    @property
    def ratio(self):
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes


def row_of_rank(rank, world_size, case):
    """Returns the row of this rank. Every rank calls it at the same time."""
    config = case.config
    with parallel_state(config.parallel, seed=config.training.seed) as parallel:
        measured = measure(config, parallel)
        predicted = own_step_peak(config, parallel)
    return Row(predicted.num_bytes, measured, predicted.moment)


def rows(case):
    """Runs a case. Returns the row of every rank; ranks of equal sizes give one row."""
    return set(run_ranks(row_of_rank, case.ranks, case))
