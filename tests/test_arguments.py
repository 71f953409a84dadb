"""What a command line is told: faults in one line with exit status 2, notices for what does less
than it says."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from arguments import ParsedArguments, build_parser, parse_args, supported_flags, topics
from megatron_lite.cli.help import EXAMPLE, MOST_USED, TOPICS
from megatron_lite.config.megatron_flags import NO_EFFECT, ONLY_VALUE, REFUSED, WHOSE
from megatron_lite.config.run import RunConfig
from tests.support.pairs import sampled

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 "
    "--vocab-size 99 --train-iters 10"
)


def fault_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_args(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("pretrain_gpt.py: error: ") and err.endswith("\n")
    assert err.count("\n") == 1, f"one line: {err}"
    return err.removeprefix("pretrain_gpt.py: error: ")


def faults_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The faults of a command line that has several."""
    with pytest.raises(SystemExit) as stop:
        parse_args(words)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    first, *lines = err.splitlines()
    assert first == f"pretrain_gpt.py: error: {len(lines)} faults in the command line:"
    assert all(line.startswith("  - ") for line in lines), err
    return [line.removeprefix("  - ") for line in lines]


def parse(words: str) -> ParsedArguments:
    return parse_args(f"{RUN} {words}".split())


def test_all_missing_flags_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-layers", "2", "--seq-length", "8", "--vocab-size", "9"]
    assert fault_of(words, capsys) == (
        "missing --hidden-size, --num-attention-heads, --max-position-embeddings, "
        "--micro-batch-size: give them as flags, or a "
        "whole run with --config-json FILE\n"
    )


@pytest.mark.parametrize("flag", sampled(list(REFUSED), every=3))
def test_a_refused_flag_says_why(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    fault = fault_of([*RUN.split(), flag, "7"], capsys)
    assert fault.startswith(f"{WHOSE.get(flag, 'Megatron')}'s {flag} ") and REFUSED[flag] in fault


def words_of(flag: str) -> str:
    return flag if build_parser()._option_string_actions[flag].nargs == 0 else f"{flag} 1"


RETIRED = ("--no-onednn-matmuls", "--no-shared-memory-collectives")


@pytest.mark.parametrize("flag", [*RETIRED, *sampled(list(NO_EFFECT), every=8)])
def test_a_flag_without_effect_gives_one_notice_and_the_same_run(flag: str) -> None:
    parsed = parse(words_of(flag))
    assert parsed.config == parse("").config
    assert parsed.notices == (f"{flag} has no effect {NO_EFFECT[flag]}",)


@pytest.mark.parametrize(("flag", "only"), ONLY_VALUE.items())
def test_the_one_value_that_happens_anyway_is_accepted_without_a_notice(
    flag: str, only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(f"{flag} {only}") == parse("")
    if only in "01":
        assert parse(f"{flag} {only}.0") == parse("")
    assert f"not supported here, only {only}: " in fault_of([*RUN.split(), flag, "7"], capsys)


def test_a_recompute_setting_that_nothing_reads_leaves_the_run_as_it_is() -> None:
    assert parse("--recompute-method uniform --recompute-num-layers 2").config == parse("").config
    full = "--recompute-granularity full --recompute-method uniform"
    assert parse(f"{full} --recompute-modules mlp").config == parse(full).config


def test_all_faults_of_a_command_line_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--num-layers two --seed one --hidden-siz 4 --moe-latent-size 8 --moe-use-upcycling "
        "--fp8-format hybrid --window-size x --mtp-num-layers 1 --lr -1 --xyz 3"
    )
    assert faults_of([*RUN.split(), *words.split()], capsys) == [
        "argument --num-layers: two is no whole number of at most 64 bits",
        "argument --seed: one is no whole number of at most 64 bits",
        "--window-size 'x': give two numbers, the tokens before and after a query that it reads, "
        "such as 128,0",
        "unknown flag --hidden-siz: did you mean --hidden-size?",
        "unknown flag --xyz: --help lists the flags",
        "Megatron's --moe-latent-size, --moe-use-upcycling are not supported here: "
        + REFUSED["--moe-latent-size"],
        f"Megatron's --fp8-format is not supported here: {REFUSED['--fp8-format']}",
        "Megatron's --mtp-num-layers 1 is not supported here, only 0: "
        + REFUSED["--mtp-num-layers"],
        "--lr must be at least 0.0 (got -1.0)",
    ]


UNKNOWN = "--use-mup2 --sequence-paralell --hidden-sizes 32 --recompute-granularitys full"
HIDDEN = (
    ("--hidden-dropout 2 --attention-dropout 3", 2),
    ("--micro-batch-size 3 --global-batch-size 4 --bf16 --fp16", 2),
    ("--lr -1 --train-iters 3 --train-samples 4 --min-lr -2", 3),
    # between topics: the virtual stages, the tokenizer's ids, and chunks in a pipeline
    ("--seq-length 32 --hidden-dropout 2", 2),
    ("--lr-warmup-iters 3 --lr-warmup-samples 4 --eval-iters 1 --exit-interval 0", 2),
)


@pytest.mark.parametrize(("words", "least"), HIDDEN)
def test_no_fault_hides_another(words: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    """All come in one message: without the unknown flags there is nothing new."""
    alone = faults_of([*RUN.split(), *words.split()], capsys)
    with_unknown = faults_of([*RUN.split(), *UNKNOWN.split(), *words.split()], capsys)
    assert len(alone) >= least
    assert set(alone) <= set(with_unknown)


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (
            "--hidden-sizes 3 --num-layers 2 --num-attention-heads a --mock-data --lr -1",
            [
                "argument --num-attention-heads: a is",
                "unknown flag --hidden-sizes",
                "missing --max-position-embeddings, --micro-batch-size, --seq-length:",
                "--tokenizer-type NullTokenizer needs --vocab-size",
                "--lr must be",
            ],
        ),
        (
            f"--muon-nesterov --muon-momentum 0.95 --optimizr muon --seed -1 {RUN}",
            ["unk", "--seed"],
        ),
        (f"--muon-nesterov --muon-momentum 0.95 {RUN}", ["--muon-momentum", "--muon-nesterov"]),
        (f"{RUN} word --lr -1", ["'word' follows no flag", "--lr must be"]),
        ("--config-json /no --lr -1 --recompute-num-layers 2", ["--config-json /no", "--lr must"]),
        ("--hf-config /no --lr -1 --seed -1", ["/no: cannot", "--seed must be", "--lr must be"]),
    ],
)
def test_a_fault_that_may_follow_from_another_is_not_told(
    words: str, starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = faults_of(words.split(), capsys)
    assert [one[: len(start)] for one, start in zip(found, starts, strict=True)] == starts


@pytest.mark.parametrize("topic", ["refused", "ignored"])
def test_help_lists_all_flags_that_set_no_field(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help", topic])
    words = capsys.readouterr().out.split()
    assert stop.value.code == 0
    assert {"refused": {*REFUSED}, "ignored": {*NO_EFFECT}}[topic] <= set(words)


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("--global_batch_size 4", "--global-batch-size 4"),
        ("--batch_size=3", "--micro-batch-size 3"),
        ("--warmup 0.1", "--lr-warmup-fraction 0.1"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--no-position-embedding", "--position-embedding-type none"),
        (
            "--no-position-embedding --position-embedding-type rope",
            "--position-embedding-type rope",
        ),
        ("--attention-backend local", "--attention-backend unfused"),
        (
            "--use-torch-fsdp2 --no-fsdp-reshard-after-forward",
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        ),
    ],
)
def test_another_way_to_say_it_gives_the_same_run(old: str, today: str) -> None:
    assert parse(old).config == parse(today).config
    assert parse(today).config != parse("").config


def test_vocabulary_files_alone_mean_the_gpt2_tokenizer_as_in_megatron() -> None:
    run = RUN.replace("--vocab-size 99", "--vocab-file vocab.json --merge-file merges.txt").split()
    assert parse_args(run).config.tokenizer.tokenizer_type == "GPT2BPETokenizer"


def help_of(words: str, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """What a command line that ends in a help prints."""
    with pytest.raises(SystemExit) as stop:
        parse_args(words.split())
    assert stop.value.code == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def flags_in(text: str) -> set[str]:
    """The flags that a help describes: those at the start of a line."""
    lines = [line for line in text.splitlines() if line.startswith("  -")]
    return {
        word.rstrip(",")
        for line in lines
        for word in line.strip().split("  ")[0].split()
        if word.startswith("--")
    }


def test_help_alone_is_short_and_its_command_line_is_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of("--num-layers 2 --help", capsys)
    lines = text.splitlines()
    assert len(lines) <= 55 and max(map(len, lines)) <= 100
    assert flags_in(text) >= {*MOST_USED} and len(MOST_USED) == 10
    assert all(f"\n  {topic} " in text for topic in TOPICS)
    assert parse_args(shlex.split(EXAMPLE.replace("\\\n", " "))).notices == ()


def test_the_topics_of_help_share_out_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    every = flags_in(help_of("--help all", capsys))
    of_topics = [flags_in(help_of(f"--help {topic}", capsys)) for topic in TOPICS]
    assert every == {*supported_flags(build_parser())} - {"-h"}
    assert sum(map(len, of_topics)) == len(every) and {*itertools.chain(*of_topics)} == every
    assert {*TOPICS} - {"general"} == {name.replace("_", "-") for name in topics()}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--moe-latent-size", "--moe-latent-size is refused: "),
        ("moe_latent_size", "--moe-latent-size is refused: "),
        ("--use-mcore-models", "--use-mcore-models is accepted and has no effect here: "),
        ("--batch-size", "--batch-size is an old spelling of --micro-batch-size"),
    ],
)
def test_help_on_a_flag_that_only_megatron_has_tells_what_happens_to_it(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(f"--help {word}", capsys)
    assert text.startswith(said) and text.count("\n") <= 2


def test_help_on_nothing_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --help recompute?" in help_of("--help recomputing", capsys, status=2)
    assert help_of("--help zzz", capsys, status=2).count("\n") == 1


# --dump-config and --config-json

MANY = (
    "--position-embedding-type rope --swiglu --lr 3e-4 --lr-decay-style cosine --data-path a b "
    "--split 98,2,0 --save out "
    "--save-interval 5 --bf16 --no-bias-gelu-fusion --disable-bias-linear --hidden-size 64"
)


def test_a_dumped_run_is_read_back_equal_and_flags_override_it(tmp_path: Path) -> None:
    config = parse(f"{MANY} --seed 7").config
    path = tmp_path / "run.json"
    path.write_text(config.to_json())
    assert parse_args(["--config-json", str(path)]).config == config
    # a flag overrides the file, also with its default
    read = parse_args(["--config-json", str(path), "--seed", "1234"]).config
    assert read == replace(config, training=replace(config.training, seed=1234))


def test_sizes_that_follow_from_others_follow_an_overriding_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(parse("").config.to_json())
    model = parse_args(["--config-json", str(path), "--hidden-size", "32"]).config.model
    assert (model.kv_channels, model.ffn_hidden_size) == (8, 128)


def test_dump_config_prints_json_to_stdout_and_notices_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"{RUN} --dump-config --tp-comm-overlap --save-interval 5"
    assert pretrain_gpt.main(words.split()) == 0
    out, err = capsys.readouterr()
    assert RunConfig.from_json(out) == parse("--save-interval 5").config
    assert err.splitlines() == list(parse("--tp-comm-overlap --save-interval 5").notices)
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" + "0" * 4000, "is no whole number"),
        ("1" + "0" * 5000, "is no whole number"),
        (str(2**63), "is no whole number"),
        ("x" * 5000, "xxx... (5000 characters) is no whole"),
    ],
)
def test_a_number_of_any_length_is_one_short_line(capsys, text, message):
    with pytest.raises(SystemExit, match="2"):
        parse_args([*RUN.split(), "--num-layers", text])
    error = capsys.readouterr().err
    assert error.startswith("pretrain_gpt.py: error: argument --num-layers: ") and message in error
    assert error.count("\n") == 1 and len(error) < 250


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 200_000, '{"model": {"num_layers": 1%s}}' % ("0" * 5000)]
)
def test_a_config_file_beyond_all_bounds_is_one_short_line(capsys, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        parse_args(["--config-json", str(tmp_path / "run.json")])
    error = capsys.readouterr().err
    assert error.startswith(f"pretrain_gpt.py: error: --config-json {tmp_path}/run.json: ")
    assert error.count("\n") == 1 and len(error) < 400
