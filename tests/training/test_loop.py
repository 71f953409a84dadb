"""What the loop does around the steps.

--wandb-project: TensorBoard's scalars in an offline run of Weights & Biases.
"""

import re
from unittest.mock import Mock

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.training.evaluate import mean_loss
from megatron_lite.training.log_files import metrics_file
from tests.support.modules import provide
from tests.support.rank_faults import NO_DROPOUT
from tests.support.runs import events_in, rows, run_to_end, tiny_run


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The metrics file of a run."""
    path = tmp_path_factory.mktemp("plain") / "m.jsonl"
    run_to_end(tiny_run(metrics=path))
    return path


@pytest.mark.parametrize("training", [dict(seed=1234), dict(seed=6), dict(eval_interval=3)])
def test_the_same_seed_repeats_every_digit_over_evaluations_and_another_does_not(
    training, plain, tmp_path
):
    """With dropout on: an evaluation that drew a random number, or left the model in eval mode,
    would show."""
    run_to_end(tiny_run(metrics=tmp_path / "m", **training))
    assert (rows(tmp_path / "m") == rows(plain)) == (training != dict(seed=6))


def test_the_global_batch_is_the_same_however_it_is_cut(tmp_path):
    losses = []
    for size in (1, 2, 4):
        file = tmp_path / str(size)
        run_to_end(tiny_run(**NO_DROPOUT, micro_batch_size=size, train_iters=8, metrics=file))
        losses.append([row["lm_loss"] for row in rows(file)])
        assert losses[-1] == pytest.approx(losses[0], rel=1e-4)


def test_the_iteration_line_is_what_megatron_parsers_expect(tmp_path, capsys):
    """In the log file, and on standard output by a flag."""
    path = tmp_path / "log"
    run_to_end(tiny_run(log_style="megatron", log_file=str(path)))
    lines, filed = (
        [line for line in text.splitlines() if " iteration " in line and "consumed" in line]
        for text in (capsys.readouterr().out, path.read_text())
    )
    assert lines == filed
    assert len(lines) == 4  # 20 iterations, one line every 5
    pattern = (
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +5/ +20 \| consumed samples: +20 \| "
        r"elapsed time per iteration \(ms\): [\d.]+ \| learning rate: \d\.\d{6}E[-+]\d\d \| "
        r"global batch size: +4 \| "
        r"lm loss: \d\.\d{6}E[-+]\d\d \| loss scale: 1\.0 \| grad norm: \d+\.\d{3} \| "
        r"number of skipped iterations:   0 \| number of nan iterations:   0 \| tokens/s/GPU: "
        r"[\d.]+ \| "
        r"activation MiB predicted/measured: 0\.\d+/0\.\d+ \| "
        r"peak GiB resident, of the process of rank 0: [\d.]+ \| ETA: \d+:\d\d:\d\d \|"
    )
    assert re.fullmatch(pattern, lines[0]), lines[0]


def test_tensorboard_has_megatrons_names(tmp_path):
    run_to_end(
        tiny_run(
            eval_interval=10,
            tensorboard_dir=str(tmp_path),
            log_params_norm=True,
            log_num_zeros_in_grad=True,
            log_timers_to_tensorboard=True,
            log_validation_ppl_to_tensorboard=True,
            log_world_size_to_tensorboard=True,
        )
    )
    events, by_samples = events_in(tmp_path), events_in(tmp_path / "by_samples")
    assert [event.step for event in by_samples.Scalars("lm loss vs samples")] == list(
        range(4, 81, 4)
    )
    assert set(by_samples.Tags()["scalars"]) == {
        f"{name} vs samples"
        for name in (
            *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm"),
            *("num-zeros", "params-norm", "lm loss validation", "lm loss validation ppl"),
            *("lm loss test", "lm loss test ppl"),
        )
    }
    assert [event.step for event in by_samples.Scalars("lm loss validation vs samples")] == [40, 80]
    ours = {"iteration-time", "throughput", "tokens-per-second", "mem-peak-gib"}
    names = {tag.removesuffix(" vs samples") for tag in by_samples.Tags()["scalars"]}
    assert names | ours <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("lm loss")] == list(range(1, 21))


@pytest.mark.parametrize("kind", ["metrics_jsonl", "tensorboard_dir"])
def test_a_log_that_cannot_be_written_is_one_error(tmp_path, kind):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=kind.replace("_", "-")):
        run_to_end(tiny_run(**{kind: str(tmp_path / "file" / "below")}))


def test_a_file_that_holds_no_metrics_is_refused_and_one_cut_row_is_kept_aside(tmp_path):
    path = tmp_path / "m"
    for content in (b"\xff\n", b"\x03\0", b"{}"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no metrics of a run"):
            metrics_file(str(path), 0)
        assert path.read_bytes() == content
    path.write_text('{"iter')
    metrics_file(str(path), 0).close()
    assert path.read_text() == "" and (tmp_path / "m.previous").read_text() == '{"iter'


def test_two_files_of_a_run_are_not_one_but_for_devices(tmp_path):
    (tmp_path / "link").symlink_to("train.log")
    with pytest.raises(InputError, match="link: is the log file and --metrics-jsonl: give"):
        run_to_end(tiny_run(metrics=tmp_path / "link", log_file=tmp_path / "train.log"))
    run_to_end(tiny_run(train_iters=1, metrics="/dev/null", log_file="/dev/null"))


def test_a_run_from_scratch_removes_the_summary_of_an_earlier_one(tmp_path):
    summary = tmp_path / "m.summary.json"
    summary.touch()
    for iteration in (1, 0):
        assert summary.exists()
        metrics_file(f"{tmp_path}/m", iteration).close()
    assert not summary.exists()


def test_rows_with_numbers_that_json_has_not_stay(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"iteration": 1, "lm_loss": NaN}\n')
    metrics_file(str(path), 1).close()
    assert path.read_text() == '{"iteration": 1, "lm_loss": NaN}\n'


def _config(folder):
    return tiny_run(
        metrics=folder / "m",
        train_iters=4,
        eval_iters=1,
        wandb_project="project",
        wandb_exp_name="name",
        wandb_save_dir=str(folder / "w"),
        tensorboard_log_interval=2,
        log_world_size_to_tensorboard=True,
        log_loss_scale_to_tensorboard=False,
    )


def test_the_scalars_of_every_second_iteration_and_of_evaluations_are_logged(tmp_path, monkeypatch):
    fake = Mock()
    provide(monkeypatch, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run_to_end(_config(tmp_path))
    settings, run = fake.init.call_args.kwargs, fake.init.return_value
    assert settings.pop("config")["model"]["num_layers"] == 2
    names = dict(project="project", name="name", entity=None)
    assert settings == dict(names, dir=str(tmp_path / "w"), mode="offline")
    written = {row["iteration"]: row for row in rows(tmp_path / "m")}
    logged = [(call.kwargs["step"], *call.args) for call in run.log.call_args_list]
    training, evaluations = logged[:2], logged[2:]
    for (step, scalars), iteration in zip(training, (2, 4), strict=True):
        assert step == iteration
        for speed_or_memory in ("throughput", "tokens-per-second", "mem-peak-gib"):
            assert scalars.pop(speed_or_memory) > 0.0
        assert scalars == {
            "learning-rate": written[iteration]["learning_rate"],
            "batch-size": 4,
            "lm loss": written[iteration]["lm_loss"],
            "world-size": 1,
            "grad-norm": written[iteration]["grad_norm"],
            "samples vs steps": 4 * iteration,
        }
    assert [(step, sorted(scalars)) for step, scalars in evaluations] == [
        (4, ["lm loss validation", "samples vs steps"]),
        (4, ["lm loss test", "samples vs steps"]),
    ]
    run.finish.assert_called_once()


@pytest.mark.parametrize(
    "module, message",
    [
        (None, "--wandb-project project needs the package wandb, which is not installed: pip"),
        (
            Mock(**{"init.side_effect": RuntimeError("no")}),
            r"--wandb-project project: cannot be written \(no\)",
        ),
    ],
)
def test_a_run_that_cannot_be_begun_is_one_clear_error(tmp_path, monkeypatch, module, message):
    provide(monkeypatch, "wandb", module)
    with pytest.raises(InputError, match=message):
        run_to_end(_config(tmp_path))


def test_a_batch_of_evaluations_has_its_own_size_and_training_is_the_same(tmp_path):
    """The same samples in one large batch, and in batches of training's size."""
    found = []
    for evaluation in (
        dict(eval_iters=3),
        dict(eval_iters=1, eval_global_batch_size=12),
        dict(eval_iters=6, eval_global_batch_size=2),
        dict(eval_iters=1),
    ):
        file = tmp_path / str(len(found))
        trainer = run_to_end(tiny_run(metrics=file, train_iters=3, eval_interval=2, **evaluation))
        losses = [row["lm_loss"] for row in rows(file)]
        weights = [weight.detach() for weight in trainer.model.parameters()]
        assert trainer.datasets.valid is not None
        found.append((losses, weights, mean_loss(trainer, trainer.datasets.valid)))
    for losses, weights, _ in found[1:]:
        assert losses == found[0][0] and len(losses) == 3
        assert all(map(torch.equal, weights, found[0][1]))
    assert found[0][2] == found[1][2] == found[2][2] != found[3][2]
    with pytest.raises(ValueError, match="--eval-global-batch-size: a batch of 3 samples"):
        run_to_end(tiny_run(micro_batch_size=2, eval_global_batch_size=3))
