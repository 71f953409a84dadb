"""Loads the model of a checkpoint and continues texts with it: the work of `generate`.

The tensor-parallel size is the number of ranks, at any parallel size of the checkpoint. generate.py
reads the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpointing.load import load_weights
from megatron_lite.checkpointing.metadata import Metadata, read_config
from megatron_lite.checkpointing.start import find_step
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizer_files import READ_FILES, read_from
from megatron_lite.data.tokenizers import Tokenizer, build_tokenizer
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.collectives import broadcast_
from megatron_lite.parallel.launch import read_launch
from megatron_lite.parallel.rng import derive_seed
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.tools.sampling import Sampling, generate_tokens, text_pieces
from megatron_lite.training.build_trainer import build_model

# --- the checkpoint ---


def config_for_ranks(saved: RunConfig, num_ranks: int, backend: str) -> RunConfig:
    """Returns the saved run's config for `num_ranks` tensor-parallel ranks.

    Sequence parallelism is off, because it needs context lengths that the ranks divide. The norms
    are torch's, which run anywhere. Recomputation is off: no backward runs, and a policy may name
    stages that these ranks do not have.
    Raises InputError if the model does not divide over the ranks.
    """
    parallel = ParallelConfig(tensor_model_parallel_size=num_ranks, distributed_backend=backend)
    try:
        return replace(
            saved,
            parallel=parallel,
            recompute=RecomputeConfig(),
            checkpoint=CheckpointConfig(),
            model=replace(saved.model, norm_impl="torch"),
        )
    except ValueError as error:
        raise InputError(
            f"{error}: the tensor-parallel size is the number of ranks started, start another "
            "number"
        ) from error


def tokenizer_with_files(saved: TokenizerConfig, files: dict[str, str | None]) -> TokenizerConfig:
    """Returns the saved tokenizer's config with other paths of its files.

    Raises InputError for a file that this type of tokenizer does not have.
    """
    moved = {name: path for name, path in files.items() if path is not None}
    for name in moved:
        if name not in READ_FILES[str(saved.tokenizer_type)]:
            raise InputError(
                f"--{name.replace('_', '-')} is no part of the checkpoint's "
                f"{saved.tokenizer_type}: leave it out"
            )
    return replace(saved, **moved)  # type: ignore[arg-type]


def load_model(step: Path, config: RunConfig, parallel: ParallelState) -> GPTModel:
    """Returns this rank's shard of the saved model, in evaluation mode (no dropout)."""
    model = build_model(config, parallel)
    load_weights(step, Metadata.read(step), parallel, model)
    model.eval()
    return model


# --- the texts ---


def run(args: argparse.Namespace, sampling: Sampling, program: str) -> None:
    """Continues every prompt of a parsed command line. Rank 0 prints.

    program: the name of the program that the user started, for advice.
    """
    step, notices = find_step(args.load, args.iteration, program)
    num_ranks = dist.get_world_size() if dist.is_initialized() else read_launch().world_size
    config = config_for_ranks(read_config(step), num_ranks, args.distributed_backend)
    tokenizer = build_tokenizer(
        tokenizer_with_files(
            read_from(config.tokenizer, step),
            {name: getattr(args, name) for name in ("tokenizer_model", "vocab_file", "merge_file")},
        )
    )
    if tokenizer.vocab_size > config.tokenizer.true_vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model "
            f"{config.tokenizer.true_vocab_size}: it is not the one that the model was trained with"
        )
    eod = end_of_document(tokenizer)
    with parallel_state(config.parallel, seed=args.seed) as parallel:
        model = load_model(step, config, parallel)
        if parallel.rank == 0 and notices:
            print(*notices, sep="\n", file=sys.stderr, flush=True)
        for number, text in enumerate(args.prompt):
            prompt = read_prompt(parallel) if text == "-" else text
            # An empty prompt is the start of a document.
            tokens = tokenizer.tokenize(prompt) or ([] if eod is None else [eod])
            if not tokens:
                raise InputError(
                    "--prompt is empty and the tokenizer has no end-of-document token to start "
                    "from: give a text"
                )
            window = config.data.seq_length
            if parallel.rank == 0 and len(tokens) + args.max_new_tokens > window:
                print(
                    f"note: the model sees the last {window} tokens only (its --seq-length), fewer "
                    f"than the prompt's {len(tokens)} and --max-new-tokens {args.max_new_tokens} "
                    "together",
                    file=sys.stderr,
                    flush=True,
                )
            new_tokens = generate_tokens(
                model,
                tokens,
                sampling=sampling,
                max_new_tokens=args.max_new_tokens,
                window=window,
                eod=eod,
                generator=torch.Generator().manual_seed(derive_seed(args.seed, number)),
                parallel=parallel,
            )
            show(
                prompt,
                text_pieces(tokenizer, tokens, new_tokens),
                first=number == 0,
                silent=parallel.rank != 0,
            )


def show(prompt: str, pieces: Iterable[str], *, first: bool, silent: bool) -> None:
    """Prints the prompt and its continuation, after a line of dashes unless `first`.

    A terminal gets them piece by piece, anything else at once. A silent rank prints nothing but
    still consumes the pieces, because the other ranks wait for it.
    """
    streams = sys.stdout.isatty()
    text = prompt if first else f"{'-' * 40}\n{prompt}"
    if not streams or silent:
        text += "".join(pieces)
        if not silent:
            print(text, flush=True)
        return
    print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def read_prompt(parallel: ParallelState) -> str:
    """Returns rank 0's standard input on every rank, without the final newline that a shell adds.

    Issues two broadcasts over the TP group. Raises InputError unless the input is UTF-8.
    """
    data = sys.stdin.buffer.read() if parallel.rank == 0 else b""
    size = int(broadcast_(torch.tensor([len(data)], device=parallel.device), parallel.tp_group))
    characters = torch.tensor(list(data) or [0] * size, dtype=torch.uint8, device=parallel.device)
    try:
        return bytes(broadcast_(characters, parallel.tp_group).tolist()).decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt -: standard input is not UTF-8 text ({error})") from error


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """Returns the id that ends a document, or None if the tokenizer has none."""
    try:
        return tokenizer.eod
    except InputError:
        return None
