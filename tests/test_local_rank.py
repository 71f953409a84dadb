"""`--local_rank=N`, as DeepSpeed's launcher and old launchers of torch pass it, on its way from the
command line to the run."""

import pytest

import pretrain_gpt
from megatron_lite.cli import pretrain
from tests.support.commands import MOCK, SMALL_RUN

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def launches(monkeypatch):
    """The launch of each training that `main` begins, without the training."""
    found = []

    def begun(config, notices, launch, program):
        found.append(launch)
        return 0

    monkeypatch.setattr(pretrain, "train", begun)
    monkeypatch.setattr(pretrain, "SPEAKS_BEFORE_S", 0.0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("variable", "words", "local_rank"),
    [
        (None, ["--local_rank=3"], 3),
        (None, [], 1),
        ("2", [], 2),
        ("", ["--local-rank=1"], 1),  # no launcher
    ],
)
def test_the_run_takes_the_local_rank_of_the_launcher(
    launches, monkeypatch, variable, words, local_rank
):
    given = LAUNCHED if variable is None else {**LAUNCHED, "LOCAL_RANK": variable}
    for name, value in given.items() if variable != "" else ():
        monkeypatch.setenv(name, value)
    assert pretrain_gpt.main([*SMALL_RUN, *MOCK, *words]) == 0
    assert [launch.local_rank for launch in launches] == [local_rank]
