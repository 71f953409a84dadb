"""What a run says of its own memory, and that no policy changes a digit of what it logs.

The kept bytes of runs whose weights are sharded over data-parallel ranks.
"""

import os

import pytest
import torch

import pretrain_gpt
from megatron_lite.memory.measure.timeline import compared, read_timeline
from megatron_lite.model.layer import MLP
from megatron_lite.training.step import TrainingError
from tests.support.changes import with_settings
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.layouts import LAYOUTS
from tests.support.mutants import replaces
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run


def _keep_a_tensor(monkeypatch, kept, *, by_the_graph):
    """The MLP's activation keeps 4 bytes per element of its output more than it did: for backward,
    or just so."""

    @replaces("_activate", MLP)
    def wasteful(activate, self, intermediate):
        output = activate(self, intermediate)
        if by_the_graph:
            return output * torch.ones_like(output)
        kept.append(output.detach().clone())
        return output

    wasteful(monkeypatch)


MLP_BYTES = 2 * 16 * 1 * 4 * 32 * 4  # layers, s, b, f, float32


@pytest.mark.parametrize("verify", [False, True])
def test_bytes_that_were_not_predicted_are_a_warning_and_under_verify_an_error(
    monkeypatch, capsys, verify
):
    _keep_a_tensor(monkeypatch, [], by_the_graph=True)
    config = tiny_run(train_iters=1, recompute_verify=verify)
    if verify:
        with pytest.raises(TrainingError, match="(?s)--recompute-verify") as raised:
            run_to_end(config)
        said = str(raised.value)
    else:
        run_to_end(config)
        printed = capsys.readouterr().out.splitlines()
        (said,) = (line for line in printed if line.startswith("warning"))
    # torch keeps the ones, not the output
    assert f"were predicted (+{MLP_BYTES})" in said and "layer 0: " in said


def test_a_tensor_that_lives_on_beside_the_graph_is_an_error_under_verify(monkeypatch):
    _keep_a_tensor(monkeypatch, [], by_the_graph=False)
    config = tiny_run(train_iters=1, recompute_verify=True)
    with pytest.raises(TrainingError, match=f"{MLP_BYTES} bytes live on"):
        run_to_end(config)


def _train(rank, world_size, folder, timeline):
    run_to_end(
        tiny_run(
            tp_size=world_size,
            metrics=folder / "metrics",
            train_iters=3,
            recompute_policy="*:full",
            memory_timeline=timeline,
        )
    )


def test_a_timeline_of_the_run_is_written_and_changes_nothing(tmp_path):
    plain, recorded = tmp_path / "plain", tmp_path / "recorded"
    run_ranks(_train, 2, plain, None)
    run_ranks(_train, 2, recorded, str(recorded / "timeline.json"))
    assert rows(plain / "metrics") == rows(recorded / "metrics")
    timeline = read_timeline(str(recorded / "timeline.json"))
    assert timeline.name == "*:full" and {event.phase for event in timeline.events} == {
        "forward",
        "replay",
        "backward",
    }
    rebuilt = {event.phase: event.live_bytes[1] for event in timeline.events}
    assert rebuilt["forward"] == 0 < rebuilt["replay"]
    points = compared(timeline)
    assert len(points) == 2 + 1 + 2 * 2  # each layer's forward, the loss, each replay and backward
    exact = [one for one in points if one[1].phase != "forward" or one[1].first_layer < 0]
    assert len(exact) == 5
    assert all(point.num_bytes == event.kept_bytes for event, point in exact)


def test_a_timeline_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    run_to_end(tiny_run(train_iters=3, memory_timeline=str(tmp_path / "pipe")))
    assert "could not be written (is no regular file, so" in capsys.readouterr().out
    assert (tmp_path / "pipe").is_fifo()


def test_a_replay_that_differs_ends_the_program_with_one_line_that_names_it(monkeypatch, capsys):
    calls = iter(range(10**6))

    @replaces("_activate", MLP)
    def counting(activate, self, intermediate):
        return activate(self, intermediate) * (1.0 + next(calls))

    counting(monkeypatch)
    words = "--recompute-policy *:full --recompute-verify"
    status = pretrain_gpt.main([*SMALL_RUN, *MOCK, *words.split()])
    error = capsys.readouterr().err.strip().splitlines()
    assert status == 1 and len(error) == 1
    assert (
        "--recompute-verify: a replay is not what its forward was at layer 1, activation: "
        "tensor 0 [16, 2, 128]"
    ) in error[0]


POLICIES = ("*:full/2", "*:pointwise@host", "*:core_attn+mlp", "*:ops(matmul)")


def test_kept_bytes_are_as_predicted_with_recomputation_and_sharded_weights():
    config = tiny_run(
        data_parallel=LAYOUTS["fsdp2, memory-efficient"],
        untie_embeddings_and_output_weights=True,
        recompute_verify=True,
        train_iters=1,
        eval_iters=0,
    )

    def work(rank, world_size):
        for policy in POLICIES:  # --recompute-verify ends a run whose bytes differ
            run = run_to_end(with_settings(config, recompute_policy=policy))
            assert run.kept_bytes["activation_bytes_measured"] > 0

    run_ranks(work, 2)
