"""The commands that use a converted checkpoint: tokenizing a text, training on it, and generating.

They are printed where a conversion ends. The shape of the model, its precision and its tokenizer
come from the checkpoint, so that the commands run as printed once the text is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron_lite.checkpointing.metadata import Metadata, read_config
from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.step_files import CONFIG
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.invocation import shell_lines, subcommand, training_command
from megatron_lite.config.run_flags import flag_words
from megatron_lite.data.tokenizers import build_tokenizer

USUAL_LENGTH = 2048  # the longest --seq-length that is proposed
NUM_ITERATIONS = 1000
LEARNING_RATE = "1e-5"  # low: the weights are trained, and no warm-up is proposed
TEXT = "text"
IDS = ("NullTokenizer",)  # types whose texts are token ids
SIZED = (*IDS, "TikTokenizer")  # types that need --vocab-size


def next_lines(save: Path, program: str) -> Iterator[str]:
    """Yields the lines about a checkpoint directory that was just written.

    program: the name of the program that wrote it, as the user typed it.
    """
    step = find_step(str(save)).step
    config, metadata = read_config(step), Metadata.read(step)
    training, reads_ids = config.training, config.tokenizer.tokenizer_type in IDS
    # Without optimizer states a run begins at iteration 0.
    done = 0 if "optimizer" in metadata.missing else metadata.progress.iteration
    preprocess = (
        *subcommand(program, "preprocess"),
        *("--input", f"{TEXT}.jsonl", "--output-prefix", TEXT),
        *_tokenizer_flags(config.tokenizer),
    )
    train = (
        *training_command(program, config.parallel.model_ranks),
        *("--config-json", str(step / CONFIG), "--load", str(save)),
        # The file has it too. Who writes a command of his own must not miss it.
        *(["--bf16"] * training.bf16 + ["--fp16"] * training.fp16),
        *("--seq-length", str(min(config.data.seq_length, USUAL_LENGTH))),
        *("--data-path", f"{TEXT}_text_document"),
        *("--train-iters", str(done + NUM_ITERATIONS), "--lr", LEARNING_RATE),
        *("--save", f"{save}-trained"),
    )
    prompt = "1 2 3" if reads_ids else "Once upon a time"
    generate = (*subcommand(program, "generate"), "--load", str(save), "--prompt", prompt)
    yield ""
    if reads_ids:
        yield "The source has no tokenizer. A text is token ids in the commands below."
    yield f"To train further on the text of {TEXT}.jsonl, and to generate:"
    yield from (shell_lines([*words]) for words in (preprocess, train, generate))


def _tokenizer_flags(config: TokenizerConfig) -> Iterator[str]:
    """Yields the flags of `preprocess` for the tokenizer of a checkpoint."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name == "make_vocab_size_divisible_by":
            continue
        if field.name != "vocab_size" or config.tokenizer_type in SIZED:
            yield from flag_words(field.name, value)
    try:
        build_tokenizer(config).eod  # noqa: B018
    except InputError:
        return  # it has no end-of-document token, or its library is not installed
    yield "--append-eod"
