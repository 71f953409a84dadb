"""What a conversion writes: a folder that appears complete or not at all, and files in it.

The folder is written as NAME.incomplete-RANDOM beside the target. At the end all files are synced
and it is renamed. A killed conversion leaves its folder behind, whose lock is free: the next one
removes it. Nothing else is followed, emptied or removed, whatever its name.

Safetensors files are written tensor by tensor, so that only one is in memory:

    8 bytes: length of the header | the header, JSON with spaces at its end | the tensors' bytes

The header has the name, dtype, shape and place of each tensor. Readers map the file and use tensors
where they lie, so the widest elements come first: then each tensor begins at a multiple of its
element size.
"""

import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.lock import try_lock
from megatron_lite.checkpointing.shards import FLOATS
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import MissingPackage
from megatron_lite.convert.weights import WeightSource
from megatron_lite.data.durable_files import naming, sync
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, contents_of
from megatron_lite.data.tokenizers import build_tokenizer

SUFFIX = ".incomplete"
LOCK = "conversion.lock"
MARK = b"megatron_lite: this folder belongs to a conversion, and the next one removes it\n"
ALIGNMENT = 8
NAMES = {dtype: name for name, dtype in FLOATS.items()}

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape, by name


def check_absent(target: Path) -> None:
    """Raises InputError if the target exists already and is no empty folder."""
    is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not is_empty:
        raise InputError(
            f"--save {target} exists already, and a conversion replaces nothing: choose another "
            "path, or remove it"
        )


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yields the folder to write into, which has the name `target` after the block.

    If the block raises, nothing is left. Raises InputError if the target exists, if another
    conversion writes to it, or if the disk refuses a file.
    """
    check_absent(target)
    folder = target.with_name(f"{target.name}{SUFFIX}-{secrets.token_hex(4)}")
    with naming(f"--save {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target)
        folder.mkdir()
        try:
            with (folder / LOCK).open("xb", buffering=0) as lock:
                # The mark comes after the lock: a marked folder is never seen without it.
                try_lock(lock.fileno())
                lock.write(MARK)
                yield folder
                check_absent(target)
                (folder / LOCK).unlink()
                for path in (*folder.rglob("*"), folder):
                    sync(path)
                os.rename(folder, target)
                sync(target.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _remove_left(target: Path) -> None:
    """Removes what killed conversions to the target have left. Raises InputError if one runs."""
    for mark in target.parent.glob(f"{glob.escape(target.name)}{SUFFIX}*/{LOCK}"):
        is_owned = mark.parent.lstat().st_uid == os.getuid() and mark.is_file()
        if mark.is_symlink() or mark.parent.is_symlink() or not is_owned:
            continue
        with mark.open("r+b", buffering=0) as lock:
            if lock.read(len(MARK) + 1) != MARK:
                continue  # not ours
            is_free = try_lock(lock.fileno())
            if is_free is False:
                raise InputError(
                    f"--save {target}: another conversion writes there already: wait for its end, "
                    "or choose another path"
                )
            if is_free:
                shutil.rmtree(mark.parent, ignore_errors=True)


def create_files(
    folder: Path,
    files: Mapping[str, Tensors],
    texts: Mapping[str, bytes],
    metadata: Mapping[str, str] | None = None,
) -> Callable[[str, Tensor], None]:
    """Creates safetensors files and others in a folder.

    Returns `write(name, tensor)`, to call once for each tensor of the files.
    """
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    places: dict[str, tuple[Path, int]] = {}
    for file, tensors in files.items():
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        stop = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda one: -one[1][0].itemsize):
            start, stop = stop, stop + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        first = (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        places |= {
            name: (folder / file, first + header[name]["data_offsets"][0]) for name in tensors
        }

    def write(name: str, tensor: Tensor) -> None:
        path, start = places[name]
        with path.open("r+b") as file:
            file.seek(start)
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    return write


def json_bytes(values: Any) -> bytes:
    """Returns the text of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()


def stored_tokenizer(source: WeightSource) -> tuple[dict[str, bytes], int | None]:
    """Returns the tokenizer files of a source by name, without TOKEN_IDS, and the id that ends a
    document. The id is None if the tokenizer has none or its library is not installed.

    Raises InputError if a file is not what its name says, or if a word has no id of the model.
    """
    files = [path for path in source.tokenizer if path.name != TOKEN_IDS]
    vocab_size = source.true_vocab_size
    contents = contents_of(((path.name, path) for path in files), vocab_size)
    folder = files[0].parent if files else Path()
    config = config_of(files, folder, vocab_size)
    end = None
    if config.tokenizer_type != "NullTokenizer":
        with suppress(MissingPackage):
            tokenizer = build_tokenizer(config)
            if tokenizer.vocab_size > vocab_size:
                raise InputError(
                    f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model "
                    f"{vocab_size}: they belong to different models"
                )
            with suppress(InputError):
                end = tokenizer.eod
    return contents, end
