"""What a run looks like: short lines, settings, the summary, the log file, and slow work."""

from __future__ import annotations

import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arguments import parse_args
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.messages import told_if_slow
from megatron_lite.training.start_text import arguments_table, short_settings
from tests.support.changes import with_settings
from tests.support.limits import HANG_S
from tests.support.rank_faults import first_step_fails
from tests.support.runs import run_to_end, tiny_run


def test_the_settings_at_the_start_are_those_that_differ() -> None:
    config = tiny_run(ffn_hidden_size=100, add_bias_linear=False, recompute_policy="*:full")
    lines = short_settings(config)[1:]
    words = [word for line in lines for word in shlex.split(line[line.index("--") :])]
    assert parse_args(words).config == config
    assert "--seed" not in words
    paths = tuple(f"/a/very/long/path/to/dataset-{number}_text_document" for number in range(200))
    config = with_settings(config, mock_data=False, data_path=paths)
    assert len("\n".join(short_settings(config))) < 1000


def finished_run(folder: Path, **logging: Any) -> RunConfig:
    return tiny_run(
        train_iters=4,
        eval_interval=2,
        metrics=folder / "m.jsonl",
        save=str(folder / "saved"),
        **logging,
    )


def test_the_log_file_has_the_table_and_all_lines_and_the_terminal_the_short_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = finished_run(tmp_path)
    run_to_end(config)
    printed, filed = capsys.readouterr().out, (tmp_path / "saved" / "train.log").read_text()
    assert arguments_table(config) in filed and "end of arguments" not in printed
    assert "1 rank: tensor-parallel 1" in filed
    assert "consumed samples:" not in printed and re.search(
        "^ +4/4  +[0-9.]+ .* 16$", printed, re.MULTILINE
    )
    same = [line for line in filed.splitlines() if line in printed.splitlines()]
    assert any(line.startswith("saving checkpoint at iteration") for line in same)
    rows = [line for line in printed.splitlines() if re.match(r" *(\d+/4|iteration) ", line)]
    assert len(rows) == 2 and max(map(len, rows)) <= 120


def test_the_log_file_is_appended_to_and_has_the_error_that_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "run.log"
    config = replace(finished_run(tmp_path), checkpoint=tiny_run().checkpoint)
    config = with_settings(config, log_file=str(path))
    run_to_end(config)

    first_step_fails(monkeypatch, InputError("the sky falls"))
    with pytest.raises(InputError, match="the sky falls"):
        run_to_end(config)
    text = path.read_text()
    assert text.count("started ") == text.count("end of arguments") == 2
    assert text.endswith("error: the sky falls\n")
    assert "the sky falls" not in capsys.readouterr().out


def test_the_last_lines_say_what_the_run_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    run_to_end(finished_run(tmp_path, peak_tflops_per_gpu=1.0))
    text = capsys.readouterr().out.partition("finished at iteration 4 of 4 after 0:")[2]
    for said in (
        r"16 samples, 256 tokens in 0:00:\d\d: [\d,]+ tokens/s, MFU \d+\.\d%",
        r"best loss \S+ \(perplexity \S+\) at iteration [24]\n",
        r"\S+ [KM]iB for backward by a micro-batch, as predicted",
        rf"{saved}/iter_0000004\n.* {saved}/train.log\n",
        rf"megatron_lite report {tmp_path}/m.jsonl {saved}/train.log\n$",
    ):
        assert re.search(said, text), said


def test_slow_work_is_told_of_and_short_work_is_not() -> None:
    said: list[str] = []
    with told_if_slow("short work", said.append, first_after_s=HANG_S):
        pass
    assert said == []
    twice = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    with told_if_slow("slow work", say, first_after_s=0.00101):
        assert twice.wait(HANG_S)
    assert all(re.fullmatch(r"slow work: \d+ s so far", line) for line in said[:-1])
    assert re.fullmatch(r"slow work: done after \d+\.\d s", said[-1]) and len(said) >= 3
    assert not [one for one in threading.enumerate() if one.name == "slow work"]
