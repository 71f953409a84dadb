"""Converts text to token ids:
`python -m megatron_lite.tools.preprocess_data --input corpus.jsonl --output-prefix my-corpus ...`

The tool reads one JSON object per line. It writes PREFIX_KEY_document.bin and .idx for every key of
--json-keys; `--data-path PREFIX_text_document` trains on them. The output is the same for any
number of --workers. A bad line, a full disk or a signal ends the run with one message and leaves no
files.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process

import numpy as np

from megatron_lite.config.checks import InputError, input_faults, parse_json
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.input_file import open_input
from megatron_lite.config.run_flags import add_settings, taken
from megatron_lite.config.setting import Settings, count, required, setting, switch
from megatron_lite.data.indexed import indexed_writer, token_dtype
from megatron_lite.data.tokenizers import build_tokenizer, check_encodes
from megatron_lite.parallel.signals import STOPPING

from .command import tool

# Reads documents for the data tools: one JSON object per line, {"text": "..."}.


# A tokenizer takes about 170 bytes of memory for each byte of one text: 1.4 GiB for a line of this
# length. Measured with tokenizers 0.23: 1.0 GiB for 6 MiB. Two thirds of it are the positions of
# every byte before and after normalization.
MAX_LINE_BYTES = 8 << 20


# How files of gzip, zstd, xz, bzip2 and zip begin.
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"PK\x03\x04")
Line = tuple[int, bytes]  # the number of a line of a file, counted from 1, and its content


class InputSettings(Settings):
    """A file of JSON lines."""

    input: str = required("file with one JSON object per line")
    json_keys: tuple[str, ...] = setting(
        "keys whose texts are read", ("text",), alias="--json-key", nargs="+"
    )
    max_line_bytes: int = count(
        "longest line that is read; a tokenizer takes about 170 bytes of memory for each byte of a "
        "text",
        MAX_LINE_BYTES,
    )


def lines_of(path: str, max_line_bytes: int) -> Iterator[Line]:
    """Yields the lines of a file that are not blank. At most one line is in memory.

    Raises InputError if the file does not exist or cannot be read, and for a line longer than
    `max_line_bytes`. It reads no more of such a line than the limit and one byte.
    """
    if not os.path.exists(path):
        raise InputError(f"--input {path}: no such file (one JSON object per line)")
    try:
        with open_input(path) as file:
            lines = iter(lambda: file.readline(max_line_bytes + 1), b"")
            for number, content in enumerate(lines, start=1):
                if number == 1 and content.startswith(COMPRESSED):
                    raise InputError(
                        f"--input {path} is compressed: give the file that gunzip, zstd -d, unxz, "
                        "bunzip2 or unzip makes of it"
                    )
                if len(content.rstrip(b"\r\n")) > max_line_bytes:
                    raise InputError(
                        f"{path}:{number}: the line is longer than --max-line-bytes "
                        f"{max_line_bytes}, and a tokenizer takes about 170 times its length in "
                        "memory: split the document into several lines, or give a higher limit"
                    )
                if content.strip():
                    yield number, content
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_line(line: bytes, keys: Iterable[str], where: str) -> list[str]:
    """Returns the texts under `keys` of one line.

    Raises InputError, which names `where` (file:line), if the line is not an object with a string
    under each key, or if a text cannot be encoded.
    """
    with input_faults(  # bad UTF-8 is a UnicodeDecodeError, which is a ValueError
        f"{where}: not a line of JSON (",
        '): each line must be an object such as {"text": "..."}; docs/data.md has a command that '
        "makes such lines of a plain text",
    ):
        document = parse_json(line, strict=False)
    if not isinstance(document, dict):
        raise InputError(
            f'{where}: expected an object such as {{"text": "..."}}, found '
            f"{type(document).__name__}"
        )
    texts = []
    for key in keys:
        text = document.get(key)
        if not isinstance(text, str):
            found = type(text).__name__ if key in document else f"only {', '.join(document)}"
            raise InputError(
                f"{where}: expected a string under {key!r}, found {found} (--json-keys names the "
                "keys to read)"
            )
        with input_faults(f"{where}: "):
            check_encodes(text)
        texts.append(text)
    return texts


BLOCK_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1  # an option of prctl(2)


class PreprocessSettings(InputSettings):
    """What is written, and how."""

    output_prefix: str = required("files are named PREFIX_KEY_document.bin and .idx")
    append_eod: bool = switch("end documents with the end-of-document token")
    workers: int = count("processes that tokenize", 1)
    log_interval: int = count("documents between two log lines", 1000)

    def check_rules(self) -> None:
        if len({*self.json_keys}) < len(self.json_keys):
            raise ValueError(
                f"--json-keys {' '.join(self.json_keys)}: a key is given twice, but each names one "
                "pair of files"
            )


# documents[line][key]: token ids. The number is the size in bytes of the lines.
Encoded = tuple[list[list[np.ndarray]], int]
Encode = Callable[[list[Line]], Encoded]


def preprocess(flags: argparse.Namespace) -> None:
    """Writes the datasets that the flags ask for.

    Raises InputError for a fault in the flags, in the tokenizer's files or in a line.
    """
    args, config = taken(PreprocessSettings, flags), taken(TokenizerConfig, flags)
    source = args.input
    tokenizer = build_tokenizer(config)
    if args.append_eod:
        _ = tokenizer.eod  # a tokenizer without one raises InputError here, before any work is done
    encode = functools.partial(_encode, config, args)
    documents, num_bytes, began = 0, 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {
            key: stack.enter_context(indexed_writer(f"{args.output_prefix}_{key}_document", dtype))
            for key in args.json_keys
        }
        blocks = _line_blocks(source, args.max_line_bytes)
        encoded_blocks = _encode_all(encode, blocks, args.workers)
        for block, size in stack.enter_context(contextlib.closing(encoded_blocks)):
            for document in block:
                for writer, ids in zip(writers.values(), document, strict=True):
                    writer.add_document(ids)
            before, documents = documents, documents + len(block)
            num_bytes += size
            if documents // args.log_interval > before // args.log_interval:
                seconds = max(time.monotonic() - began, 1e-9)
                print(
                    f"processed {documents:,} documents ({documents / seconds:,.0f} documents/s, "
                    f"{num_bytes / 1e6 / seconds:.2f} MB/s, "
                    f"{num_bytes / os.path.getsize(source):.0%} of the file)",
                    file=sys.stderr,
                    flush=True,
                )
        if not documents:
            raise InputError(f"--input {source}: no documents in it")
        for key, writer in writers.items():
            if not writer.num_tokens:
                raise InputError(
                    f"--input {source}: no tokens in it, every text under {key!r} is empty"
                )
    for writer in writers.values():
        print(
            f"{writer.prefix}.bin: {documents:,} documents, {writer.num_tokens:,} tokens of "
            f"{writer.dtype.name}",
            flush=True,
        )


def _line_blocks(path: str, max_line_bytes: int) -> Iterator[list[Line]]:
    """Yields the lines of the file in blocks of about BLOCK_BYTES."""
    block, size = [], 0
    for line in lines_of(path, max_line_bytes):
        block.append(line)
        size += len(line[1])
        if size >= BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _encode_all(
    encode: Encode, blocks: Iterable[list[Line]], workers: int
) -> Generator[Encoded, None, None]:
    """Yields the encoded blocks in order. At most four per worker are in memory.

    If the generator is closed before its end, it kills its workers: one long text would keep a
    worker busy for a minute.
    """
    if workers == 1:
        yield from map(encode, blocks)
        return
    others = active_children()
    # spawn: the tokenizer library's threads do not survive a fork
    with ProcessPoolExecutor(workers, get_context("spawn"), _follow_parent) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for block in blocks:
                pending.append(pool.submit(encode, block))
                if len(pending) >= 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                "a worker process was killed, perhaps for want of memory: use fewer --workers, or "
                "a lower --max-line-bytes"
            ) from None
        finally:
            if pending:
                for worker in active_children():
                    if worker not in others:
                        worker.kill()
            # The pool's thread removes its semaphores. A process that dies while it does so leaves
            # them to multiprocessing, which warns.
            pool.shutdown(wait=True, cancel_futures=True)


def _encode(config: TokenizerConfig, args: PreprocessSettings, lines: list[Line]) -> Encoded:
    tokenizer = _tokenizer(config)
    documents = []
    for number, content in lines:
        where = f"{args.input}:{number}"
        document = []
        for text in parse_line(content, args.json_keys, where):
            with input_faults(f"{where}: "):
                ids = tokenizer.tokenize(text)
            if ids and args.append_eod:
                ids.append(tokenizer.eod)
            document.append(np.array(ids, dtype=np.int64))
        documents.append(document)
    return documents, sum(len(content) for _, content in lines)


_tokenizer = functools.lru_cache(maxsize=1)(build_tokenizer)  # each worker loads it once


def _follow_parent() -> None:
    """Makes this worker ignore signals, which are the parent's, and end when the parent is gone.

    On Linux the kernel kills this worker when the parent ends, also while the tokenizer holds
    Python's lock for a minute. On other systems it ends when it has encoded its blocks.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        parent = parent_process()
        assert parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # the parent ended before this call
            os._exit(1)


main = tool(
    "python -m megatron_lite.tools.preprocess_data",
    "Writes .bin and .idx token files from a file of JSON lines.",
    lambda parser: add_settings(parser, PreprocessSettings, TokenizerConfig),
    preprocess,
)


if __name__ == "__main__":
    sys.exit(main())
