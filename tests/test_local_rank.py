"""`--local_rank=N`, as DeepSpeed's launcher and old launchers of torch pass it, on its way from the
command line to the run."""

import pytest

import pretrain_gpt
from megatron_lite.cli import pretrain
from tests.support.commands import MOCK, SMALL_RUN

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "variables, words, local_rank",
    [
        (LAUNCHED, ["--local_rank=3"], 3),
        (LAUNCHED, [], 1),
        ({**LAUNCHED, "LOCAL_RANK": "2"}, [], 2),
        ({}, ["--local-rank=1"], 1),  # no launcher
    ],
)
def test_the_run_takes_the_local_rank_of_the_launcher(monkeypatch, variables, words, local_rank):
    found = []
    # the launch of the training, without the training
    monkeypatch.setattr(pretrain, "train", lambda *given: found.append(given[2]) or 0)
    monkeypatch.setattr(pretrain, "SPEAKS_BEFORE_S", 0.0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pretrain_gpt.main([*SMALL_RUN, *MOCK, *words]) == 0
    assert [launch.local_rank for launch in found] == [local_rank]
