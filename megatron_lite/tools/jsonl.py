"""Documents as one JSON object per line, {"text": "..."}: what the data tools read and write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.data.tokenizers import check_encodes


def parse_line(line: bytes, keys: Iterable[str], where: str) -> list[str]:
    """The texts under `keys` of one line. InputError naming `where` (file:line) for anything that is not such an object."""
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError; deep nesting ends in the other
        raise InputError(f"{where}: not a line of JSON ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: expected an object such as {{\"text\": \"...\"}}, found {type(document).__name__}")
    texts = []
    for key in keys:
        if not isinstance(document.get(key), str):
            found = type(document[key]).__name__ if key in document else "only " + (", ".join(document) or "an empty object")
            raise InputError(f"{where}: expected a string under {key!r}, found {found} (--json-keys names the keys to read)")
        try:
            check_encodes(document[key])
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        texts.append(document[key])
    return texts


def write_documents(path: str, texts: Iterable[str]) -> None:
    """Writes one line per text, complete or not at all."""
    tmp = f"{path}.tmp-{os.getpid()}"
    try:
        with open(tmp, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.unlink(tmp)
