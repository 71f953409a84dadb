"""What a conversion writes: a folder that appears complete or not at all, and files in it.

The folder is written as NAME.incomplete-RANDOM beside the target. At the end all files are synced
and it is renamed. A killed conversion leaves its folder behind, whose lock is free: the next one
removes it. Nothing else is followed, emptied or removed, whatever its name.
"""

import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing.lock import try_lock
from megatron_lite.checkpointing.step_files import LATEST, step_directory
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import MissingPackage
from megatron_lite.data.durable_files import naming, sync
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, contents_of
from megatron_lite.data.tokenizers import build_tokenizer

from .weights import WeightSource

SUFFIX = ".incomplete"
LOCK = "conversion.lock"
MARK = b"megatron_lite: this folder belongs to a conversion, and the next one removes it\n"


def check_absent(target: Path) -> None:
    """Raises InputError if the target exists already and is no empty folder."""
    is_empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    is_empty &= target.name != ""  # the current folder, which a conversion cannot replace
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
    made = [parent for parent in target.parents if not parent.exists()]  # the innermost first
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
            with suppress(OSError):  # others may have written there
                for parent in made:
                    parent.rmdir()
            raise


@contextmanager
def new_step(path: Path, iteration: int | None) -> Iterator[Path]:
    """Yields the folder of an iteration in a checkpoint directory, or of the "release" for None.

    It and its pointer appear at `path` after the block, complete or not at all.
    """
    with complete_folder(path) as folder:
        step = folder / "release" if iteration is None else step_directory(folder, iteration)
        step.mkdir()
        yield step
        (folder / LATEST).write_text(step.name if iteration is None else str(iteration))


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


def json_bytes(values: Any) -> bytes:
    """Returns the text of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()


def stored_tokenizer(source: WeightSource) -> tuple[dict[str, bytes], int | None]:
    """Returns the tokenizer files of a source by name, without TOKEN_IDS, and the id that ends a
    document. The id is None if the tokenizer has none or its library is not installed.

    Raises InputError if a file is not what its name says, or if a word has no id of the model.
    """
    files = {name: path for name, path in source.tokenizer.items() if name != TOKEN_IDS}
    vocab_size = source.true_vocab_size
    contents = contents_of(files, vocab_size)
    folder = next(iter(files.values()), Path()).parent
    config = config_of(files, folder, vocab_size)
    end = None
    if config.tokenizer_type != "NullTokenizer":
        with suppress(MissingPackage):
            tokenizer = build_tokenizer(config)
            if tokenizer.fewest_ids > vocab_size:
                raise InputError(
                    f"{folder}: the tokenizer has {tokenizer.fewest_ids} ids and the model "
                    f"{vocab_size}: they belong to different models"
                )
            with suppress(InputError):
                end = tokenizer.eod
    return contents, end
