"""What a run takes from a checkpoint, what it refuses, and what it leaves of one.

A --load that names no checkpoint: the message says what is there, and what to give.

A run goes on with the data that its checkpoint has read; with any other only where it is told
to.
"""

import random

import pytest
import torch

from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.training.step import TrainingError
from tests.support.corpora import written
from tests.support.runs import run_to_end, step_bytes, tiny_run


def run(iterations, training=None, **checkpoint):
    settings = {"train_iters": iterations, "eval_iters": 0, **(training or {})}
    return run_to_end(tiny_run(**settings, **checkpoint))


def same_weights(one, other):
    return all(map(torch.equal, one.model.parameters(), other.model.parameters()))


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def test_a_missing_checkpoint_is_an_error_unless_allowed(tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(InputError, match=r"no checkpoint there.*--allow-fresh-start"):
        run(1, load=missing)
    assert run(1, load=missing, allow_fresh_start=True).progress.iteration == 1


def test_a_run_that_saves_where_it_loads_starts_afresh_once(tmp_path, capsys):
    """Whatever words name the directory."""
    (tmp_path / "link").symlink_to(tmp_path / "steps")
    for iterations, save, load in (
        (1, "steps", "steps"),
        (2, "steps/", "./steps"),
        (3, "link", "steps"),
    ):
        trainer = run(iterations, save=f"{tmp_path}/{save}", load=f"{tmp_path}/{load}")
        assert trainer.progress.iteration == iterations
        said = "no checkpoint there, starting from scratch" in capsys.readouterr().out
        assert said == (iterations == 1)
    assert (tmp_path / "steps" / LATEST).read_text() == "3"


def test_another_architecture_is_refused_with_the_differing_fields(tmp_path):
    run(1, save=tmp_path)
    with pytest.raises(InputError, match=r"num_layers +2 +3\n +normalization +LayerNorm +RMSNorm$"):
        run_to_end(
            tiny_run(num_layers=3, normalization="RMSNorm", hidden_dropout=0.0, load=tmp_path)
        )


def test_finetune_takes_the_weights_alone_and_no_load_optim_the_progress_too(tmp_path):
    first = run(2, save=tmp_path)
    tuned = run(0, load=tmp_path, finetune=True)
    going_on = run(2, load=tmp_path, no_load_optim=True)
    assert [one.progress.iteration for one in (tuned, going_on)] == [0, 2]
    assert [one.optimizer.num_updates for one in (tuned, going_on)] == [0, 0]
    assert same_weights(tuned, first) and same_weights(going_on, first)


def test_a_pretrained_checkpoint_gives_the_weights_until_the_run_has_its_own(tmp_path, capsys):
    """As --finetune; a run that finds its own checkpoint goes on from it."""
    first = run(2, save=tmp_path / "first")
    own = dict(
        save=tmp_path / "own", load=tmp_path / "own", pretrained_checkpoint=tmp_path / "first"
    )
    for where in (own, dict(pretrained_checkpoint=tmp_path / "first")):
        begun = run(0, **where)
        assert (begun.progress.iteration, begun.optimizer.num_updates) == (0, 0)
        assert same_weights(begun, first)
        assert "--pretrained-checkpoint: weights only" in capsys.readouterr().out
    tuned = run(3, load=tmp_path / "first", finetune=True)
    run(1, **own)
    resumed = run(3, **own)
    assert resumed.progress.iteration == 3
    assert "--pretrained-checkpoint: weights" not in capsys.readouterr().out.split("1/1")[1]
    assert same_weights(resumed, tuned)
    for elsewhere in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match="no checkpoint there"):
            run(1, pretrained_checkpoint=elsewhere)


def test_a_fresh_run_does_not_mix_with_anothers_checkpoints(tmp_path):
    run(1, save=tmp_path)
    before = step_bytes(tmp_path, 1)
    with pytest.raises(InputError, match=r"checkpoint already \(iter_0000001\).*--load"):
        run(1, dict(seed=9), save=tmp_path)
    assert step_bytes(tmp_path, 1) == before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_16_bit_checkpoint_continues_in_float32_from_its_masters_and_the_other_way_round(
    tmp_path, precision
):
    """A float16 run that finds no scale begins with the initial one."""
    half = {precision: True}
    rounded = run(2, half, save=tmp_path / "half")
    for name, parameter in run(2, load=tmp_path / "half").model.named_parameters():
        assert torch.equal(parameter, rounded.optimizer.states[name]["master"]), name
    exact = run(2, save=tmp_path / "float32")
    loaded = run(2, half, load=tmp_path / "float32")
    weights = dict(loaded.model.named_parameters())
    for name, parameter in exact.model.named_parameters():
        assert torch.equal(loaded.optimizer.states[name]["master"], parameter), name
        assert torch.equal(weights[name], parameter.to(DTYPES[precision]))


def test_a_save_directory_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--save .* cannot be written"):
        run(10**6, save=tmp_path / "file")


@pytest.mark.runs
@pytest.mark.parametrize("length", [dict(train_iters=20), dict(train_iters=None, train_samples=80)])
def test_a_run_goes_on_with_another_batch_size(tmp_path, length):
    """2 iterations of 8 samples, then 4 a time: to 20 iterations, or to 80 samples; data and
    schedule reach as far."""
    run(20, dict(**length, global_batch_size=8, exit_interval=2), save=tmp_path)
    progress = run(20, dict(**length, global_batch_size=4), load=tmp_path).progress
    iterations = 20 if length["train_iters"] else 2 + (80 - 16) // 4
    found = (progress.iteration, progress.consumed_samples)
    assert found == (iterations, 16 + (iterations - 2) * 4)


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    config = tiny_run(train_iters=1, save=tmp_path, learning_rate=1e38)
    with pytest.raises(TrainingError, match="a weight is not finite, so no checkpoint is written"):
        run_to_end(config)
    assert not (tmp_path / LATEST).exists()


def made(root):
    (root / "run" / "checkpoint" / "iter_0000020").mkdir(parents=True)
    (root / "run" / "checkpoint" / LATEST).write_text("20")
    (root / "hf").mkdir()
    (root / "hf" / "config.json").write_text("{}")
    (root / "empty").mkdir()
    (root / "file").write_text("x")
    return root


@pytest.mark.parametrize(
    "load, answer",
    [
        ("nowhere", "no such folder: give the folder that --save"),
        ("file", "it is a file: give the folder that --save"),
        ("empty", ": give the folder that --save"),
        ("run", "did you mean --load {root}/run/checkpoint?"),
        ("run/checkpoint/iter_0000020", "iteration 20: give --load {root}/run/checkpoint"),
        ("hf", "convert --from hf --to megatron-lite --load {root}/hf --save NEW_FOLDER"),
    ],
)
def test_the_answer_has_what_to_give(tmp_path, load, answer):
    root = made(tmp_path)
    with pytest.raises(InputError) as caught:
        find_step(str(root / load))
    text = str(caught.value)
    assert text.startswith(f"--load {root}/{load}: no checkpoint there (no {LATEST}): ")
    assert answer.format(root=root) in text


def write(prefix, seed=1, documents=40):
    draw = random.Random(seed)
    return written(prefix, ([draw.randrange(99) for _ in range(37)] for _ in range(documents)))


def config_of(data, **settings):
    length = {"train_iters": 3, "eval_iters": 0, "split": "90,10,0", "mock_data": False}
    return tiny_run(**length | data | settings)


@pytest.fixture
def begun(tmp_path):
    data = dict(data_path=(write(tmp_path / "a"), write(tmp_path / "b", 2)))
    run_to_end(config_of(data, save=tmp_path / "steps"))
    return tmp_path, data


CHANGES = {
    # as many documents of the same lengths
    "tokens": (lambda folder: dict(data_path=(str(folder / "a"), write(folder / "b", 3))), "files"),
    "more documents": (
        lambda folder: dict(data_path=(str(folder / "a"), write(folder / "b", 2, 41))),
        "files",
    ),
    "order": (lambda folder: dict(data_path=(str(folder / "b"), str(folder / "a"))), "files"),
    "weights": (
        lambda folder: dict(data_path=("0.3", str(folder / "a"), "0.7", str(folder / "b"))),
        "weights",
    ),
    "split": (lambda folder: dict(split="80,20,0"), "split"),
    "mock": (lambda folder: dict(data_path=(), mock_data=True), "source"),
}


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_refused_with_a_table(begun, change):
    folder, data = begun
    make, field = CHANGES[change]
    changed = {**data, **make(folder)}
    load = folder / "steps"
    table = (
        rf"(?s)was trained on other data.*--allow-changed-data.*checkpoint +this run\n.*  {field} +"
    )
    with pytest.raises(InputError, match=table):
        run_to_end(config_of(changed, train_iters=4, load=load))
    for iterations, allowed in ((4, "allow_changed_data"), (1, "finetune")):
        config = config_of(changed, train_iters=iterations, load=load, **{allowed: True})
        assert run_to_end(config).progress.iteration == iterations


def test_the_same_data_elsewhere_is_the_same_and_so_is_another_order_of_it(begun, capsys):
    """Moved files, equal shares in other numbers, another seed and length of the run: the last two
    are told."""
    folder, _ = begun
    moved = []
    for name in ("a", "b"):
        (folder / "moved" / name).mkdir(parents=True)
        for kind in (".bin", ".idx"):
            (folder / f"{name}{kind}").rename(folder / "moved" / name / f"text{kind}")
        moved.append(str(folder / "moved" / name / "text"))
    data = dict(data_path=tuple(moved), split="9, 1")
    run_to_end(config_of(data, train_iters=4, seed=5, load=folder / "steps"))
    printed = capsys.readouterr().out
    for text in (
        "changed since the checkpoint: --seed 1234 -> 5",
        "changed since the checkpoint: --train-iters 3 -> 4",
        "--seed and --train-iters can change the order of the samples",
    ):
        assert text in printed
