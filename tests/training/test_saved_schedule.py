"""A run that continues follows the schedule of its flags, or that of its checkpoint."""

from dataclasses import replace

from megatron_lite.config.optimizer_settings import LrScheduleConfig
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

FIRST = dict(lr=0.01, lr_decay_style="linear", lr_warmup_iters=1, lr_decay_iters=9, min_lr=0.001)
OTHER = dict(lr=0.5, lr_decay_style="cosine", lr_warmup_iters=3)


def _run(folder, name, schedule, *, iterations, load=None, weight_decay=0.1, **checkpoint):
    config = tiny_run(
        train_iters=iterations,
        eval_iters=0,
        metrics=folder / f"{name}.jsonl",
        weight_decay=weight_decay,
        save=str(folder / name),
        load=load and str(folder / load),
        **checkpoint,
    )
    config = replace(config, lr_schedule=LrScheduleConfig(**schedule))
    run_to_end(config)
    return config


def _rates(folder, name):
    return [row["learning_rate"] for row in rows(folder / f"{name}.jsonl")]


def test_a_run_that_takes_the_checkpoints_schedule_equals_the_uninterrupted_run(tmp_path, capsys):
    """Through two restarts, of which the second finds the schedule of the first run."""
    _run(tmp_path, "whole", FIRST, iterations=6)
    _run(tmp_path, "first", FIRST, iterations=2)
    taking = dict(OTHER, use_checkpoint_opt_param_scheduler=True)
    _run(tmp_path, "second", taking, iterations=4, load="first", weight_decay=0.7)
    _run(tmp_path, "third", taking, iterations=6, load="second", weight_decay=0.3)
    assert step_bytes(tmp_path / "third", 6) == step_bytes(tmp_path / "whole", 6)
    assert _rates(tmp_path, "second") + _rates(tmp_path, "third") == _rates(tmp_path, "whole")[2:]
    printed = capsys.readouterr().out
    assert (
        "(flags -> checkpoint: max_lr 0.5 -> 0.01, min_lr 0 -> 0.001, style cosine -> linear, "
        "warmup_samples 12 -> 4, decay_samples 16 -> 36, weight_decay 0.7 -> 0.1)"
    ) in printed
    assert "changed since the checkpoint: --lr " not in printed


def test_a_run_follows_its_flags_and_tells_how_they_differ(tmp_path, capsys):
    _run(tmp_path, "first", FIRST, iterations=2)
    _run(tmp_path, "flags", OTHER, iterations=6, load="first")
    line = (
        "max_lr 0.01 -> 0.5, min_lr 0.001 -> 0, style linear -> cosine, warmup_samples 4 -> 12, "
        "decay_samples 36 -> 24); --use-checkpoint-opt_param-scheduler follows the checkpoint"
    )
    assert line in capsys.readouterr().out
    overriding = dict(OTHER, override_opt_param_scheduler=True)
    _run(tmp_path, "override", overriding, iterations=6, load="first")
    assert "differ from the checkpoint" not in capsys.readouterr().out
    _run(tmp_path, "same", FIRST, iterations=6, load="first")
    assert "differ from the checkpoint" not in capsys.readouterr().out
    assert _rates(tmp_path, "override") == _rates(tmp_path, "flags") != _rates(tmp_path, "same")
