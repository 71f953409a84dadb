"""Plans run as printed: small runs on the CPU, with the flags of a plan of each kind."""

import json

import pytest

from megatron_lite.tools import plan
from tests.support.commands import ended
from tests.support.programs import run_program

SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 255 "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --global-batch-size 4 "
    "--micro-batch-size 1 --gpu cpu --gpus 2"
)
RUN = "--mock-data --train-iters 1 --lr 1e-3 --eval-iters 0 --distributed-backend gloo"
EXPERTS = "--num-experts 4 --moe-router-topk 1 --moe-token-dispatcher-type alltoall"


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "flags, has",
    [
        (f"{EXPERTS} --expert-model-parallel-size 2", "--moe-token-dispatcher-type alltoall"),
        ("--context-parallel-size 2 --cp-comm-type a2a p2p", "--cp-comm-type a2a p2p"),
        (
            "--tensor-model-parallel-size 2 --recompute-policy *:full+mlp/2 --loss-chunk-size 16",
            "--recompute-policy *:full+mlp/2",
        ),
    ],
)
def test_the_command_of_a_plan_trains(flags, has):
    found = ended(plan.main, [*SIZES.split(), *flags.split(), "--json", "-"])
    assert found.status == 0, found.err
    command = json.loads(found.out)["verdicts"][0]["plans"][0]["command"]
    assert has in " ".join(command)
    done = run_program(*command[command.index("train") + 1 :], *RUN.split(), ranks=2)
    assert done.returncode == 0, done.stderr
