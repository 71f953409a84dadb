"""Advice for a `--data-path` that names no token files: what is there instead, and what to give."""

from __future__ import annotations

import os
import shlex

PREFIX = (
    "--data-path takes the prefix of a .bin and .idx pair, such as my-corpus_text_document for "
    "my-corpus_text_document.bin"
)
JSON_LINES = (".json", ".jsonl", ".ndjson")
DOCUMENT = "_text_document"  # what preprocess_data appends to its prefix


def prefix_advice(prefix: str) -> str:
    """Returns what to do about a prefix without its files, as the end of a message."""
    stem, ending = os.path.splitext(prefix)
    if ending in (".bin", ".idx"):
        return f"leave the ending out: --data-path {stem}"
    if os.path.isfile(f"{prefix}{DOCUMENT}.idx"):
        return f"did you mean --data-path {prefix}{DOCUMENT}?"
    if not os.path.isfile(prefix):
        return PREFIX
    commands, lines = [], prefix
    if ending not in JSON_LINES:
        lines = f"{stem}.jsonl"
        commands.append(paragraphs_command(prefix, lines))
    tokenizer = shlex.quote(f"{stem}-tokenizer")
    read = f"--input {shlex.quote(lines)}"
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}/tokenizer.json"
    commands += [
        f"python -m megatron_lite.tools.train_tokenizer {read} --output {tokenizer}",
        f"python -m megatron_lite.tools.preprocess_data {read} --output-prefix {shlex.quote(stem)} "
        f"--append-eod {flags}",
    ]
    shown = "\n  ".join(commands)
    return (
        f"{prefix} is text, and training reads token files. Run (the first tool makes a tokenizer, "
        f"if you have none)\n  {shown}\nand then train with\n"
        f"  --data-path {shlex.quote(stem + DOCUMENT)} {flags}"
    )


def paragraphs_command(text: str, lines: str) -> str:
    """Returns the command that writes each paragraph of the file `text` as a document to `lines`.

    The whole file as one document would be in a single split, and has no limit of its length.
    """
    program = (
        'import json, sys; [print(json.dumps({"text": one})) for one in '
        'sys.stdin.read().split("\\n\\n") if one.strip()]'
    )
    return f"python -c '{program}' < {shlex.quote(text)} > {shlex.quote(lines)}"
