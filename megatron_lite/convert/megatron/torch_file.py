"""Reads what `torch.save` wrote, and other pickles, without importing or calling what they name.

Since torch 1.6 such a file is a zip archive without compression. `data.pkl` is a pickle of the
value, and each `data/N` holds the bytes of one storage, which stay in the file's memory map until
they are used. A file may also lie inside another file, as in torch's distributed checkpoints.

A pickle is a program for a stack machine. Python's machine imports the functions that a pickle
names and calls them, so a file can run any code. Here the operations are scanned first: only known
ones pass, and not too many. Then Python's machine runs with each operation replaced that imports,
calls, sets attributes or makes keys. A name, and a call of a name, become an `Inert` record. A name
that no checkpoint of Megatron-LM has is refused, so that a file of another kind fails at once.
"""

import io
import mmap
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from megatron_lite.checkpointing.metadata import MOST_DIMS
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted, open_input

MOST_BYTES = 2**28  # of one pickle; tensors are stored outside of it
MOST_OPERATIONS = 2 * 10**7  # each makes one small object at most
MOST_ARGUMENTS = 16
SMALL_KEY = 2**20  # optimizer states are numbered from 0
LONGEST_NAME = 512
# Those that move plain values, and in the last line those that import, call, set, or ask for a
# storage. Operations of protocol 0 spell numbers as texts, which takes quadratic time.
OPERATIONS = re.compile(
    r"PROTO|FRAME|STOP|MARK|POP|POP_MARK|DUP|NONE|NEW(TRUE|FALSE)|MEMOIZE|(LONG_)?BIN(GET|PUT)"
    r"|BININT[12]?|LONG[14]|BINFLOAT|(SHORT_)?BIN(STRING|UNICODE|BYTES)|BIN(UNICODE|BYTES)8"
    r"|BYTEARRAY8|EMPTY_(LIST|DICT|TUPLE)|LIST|TUPLE[123]?|APPENDS?"
    r"|GLOBAL|STACK_GLOBAL|BINPERSID|REDUCE|NEWOBJ|BUILD|SETITEMS?"
)
NAMES = re.compile(
    r"(megatron|transformer_engine|apex|pathlib|signal|numpy|datetime)(\.\w+)+"
    r"|torch\.distributed\.(checkpoint|_shard)(\.\w+)+"
    r"|argparse\.Namespace|types\.SimpleNamespace|_codecs\.encode|_io\.BytesIO"
    r"|(builtins|__builtin__)\.(list|dict|int|float|complex|str|tuple|getattr|set|bytearray)"
    r"|collections\.(defaultdict|OrderedDict)"
    r"|torch\.(bool|[a-z]+\d+\w*|[A-Z]\w+Storage|storage\.UntypedStorage|device|Size|Tensor)"
    r"|torch\.(nn\.parameter\.Parameter|serialization\._get_layout)"
    r"|torch\.(_utils\._rebuild_(tensor|parameter)\w*|_tensor\._rebuild_from_type_v2)"
)
KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
STORAGES = {f"torch.{name}Storage": getattr(torch, f"{name}Tensor").dtype for name in KINDS} | {
    "torch.storage.UntypedStorage": torch.uint8
}
DTYPES = {str(dtype): dtype for dtype in STORAGES.values()}
LOCAL_HEADER = struct.Struct("<4s22xHH")  # the signature, the lengths of the name and the extra
SIGNATURE = b"PK\x03\x04"


class Inert:
    """A name that a pickle imports, or an object whose class is not loaded.

    kind: the name, such as "torch.FloatStorage". arguments: what it was called with; None if it is
    the name alone. The fields that the pickle gives the object are attributes; a state of another
    form is its `state`.
    """

    __slots__ = ("__dict__", "arguments", "kind")  # a field has no such name
    state: Any = ()

    def __init__(self, kind: str, arguments: tuple[Any, ...] | None = None) -> None:
        self.kind, self.arguments = kind, arguments


class Window(NamedTuple):
    """A file, or the part of one from `start` that has `length` bytes (None: to its end)."""

    path: Path
    start: int = 0
    length: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.start == 0 else f"{self.path} (from byte {self.start})"


def read_torch_file(window: Window) -> Any:
    """Returns the value in a file of torch.save. Bytes of tensors are read when they are used.

    Raises InputError if the file cannot be read, is of another kind, or names code to run.
    """
    with crafted(str(window)):
        contents = _mapped(window)
        # zipfile looks for the archive at the end, so the file before it is no trouble.
        with zipfile.ZipFile(cast(IO[bytes], contents)) as archive:
            members = {one.filename: one for one in archive.infolist()}
        if sum(one.file_size for one in members.values()) > len(contents) - window.start:
            raise ValueError("its members are longer than the file")

        def member(name: str) -> memoryview:
            found = members[name]
            if found.compress_type != zipfile.ZIP_STORED or found.flag_bits & 1:
                raise ValueError(f"{name} is compressed or encrypted")
            local = LOCAL_HEADER.unpack_from(contents, found.header_offset)
            if local[0] != SIGNATURE or found.header_offset < window.start:
                raise ValueError(f"{name} is not where the archive says")
            # The extra field here may be longer than the one in the archive's directory: torch
            # fills it up so that the data are aligned.
            start = found.header_offset + LOCAL_HEADER.size + local[1] + local[2]
            return memoryview(contents)[start : start + found.file_size]

        def storage(found: Any) -> Tensor:
            kind, storage_type, key, _, numel = found
            # the text of a nested list could be endless
            if kind != "storage" or type(key) is not str or len(key) > LONGEST_NAME:
                raise ValueError("the name of a storage is no text")
            data, dtype = member(f"{folder}data/{key}"), STORAGES[storage_type.kind]
            if type(numel) is not int or not 0 <= numel * dtype.itemsize <= len(data):
                raise ValueError(f"the storage {key!r} has {len(data)} bytes")
            if numel == 0:
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer(data, dtype=dtype, count=numel)

        (name,) = (name for name in members if name.endswith("/data.pkl"))
        folder = name.removesuffix("data.pkl")
        order = f"{folder}byteorder"
        if order in members and member(order) != b"little":
            raise ValueError("its numbers are not little-endian")
        return read_pickle(member(name), str(window), storage)


def _mapped(window: Window) -> mmap.mmap:
    """Returns a memory map of the file up to the window's end."""
    with open_input(window.path) as file:
        end = 0 if window.length is None else window.start + window.length  # 0: that of the file
        found = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
    if found[window.start : window.start + len(SIGNATURE)] != SIGNATURE:
        raise InputError(
            f"{window}: is no zip archive as torch.save writes it since torch 1.6. If it is an "
            "older file of torch.save, which mixes tensors and code, load and save it again "
            "with a torch that you trust it with"
        )
    return found


def read_pickle(
    data: bytes | memoryview, where: str, storage: Callable[[Any], Any] | None = None
) -> Any:
    """Returns the value that a pickle describes. No name in the pickle is imported or called.

    where: the file, for errors.
    storage: returns the value for a persistent id, which torch uses for storages.
    Raises InputError if the pickle names anything else, or is damaged, or is too large.
    """
    with crafted(f"{where}: its pickle"):
        if len(data) > MOST_BYTES:
            raise InputError(f"{where}: a pickle is longer than {MOST_BYTES} bytes: it is not read")
        # The scan also finds texts and numbers that are cut off.
        for count, (operation, _, _) in enumerate(pickletools.genops(bytes(data))):
            if not OPERATIONS.fullmatch(operation.name):
                raise ValueError(f"the operation {operation.name} is not allowed")
            if count > MOST_OPERATIONS:
                raise InputError(
                    f"{where}: a pickle has more than {MOST_OPERATIONS} operations: it is not read"
                )
        machine = _Machine(io.BytesIO(data))
        machine.where = where
        machine.persistent_load = storage  # type: ignore[assignment,method-assign]
        return machine.load()


class _Machine(pickle._Unpickler):
    """Python's machine without imports, calls and attributes, and with keys that cost no time."""

    where: str
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if len(full) > LONGEST_NAME or "." in name or not NAMES.fullmatch(full):
            raise InputError(
                f"{self.where}: asks for {full[:200]!r}, which is no part of a Megatron "
                "checkpoint. A pickle can run code through such a name, so nothing of the file "
                "was run or read further: do not open it with torch.load either, unless you "
                "trust its origin"
            )
        return Inert(full)

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Inert) or function.arguments is not None:
            raise ValueError("it calls what is no name")
        # Many calls with a long list would take endless time.
        if type(arguments) is not tuple or len(arguments) > MOST_ARGUMENTS:
            raise ValueError(f"it calls a name with a {type(arguments).__name__} of arguments")
        call = CALLS.get(function.kind)
        self.stack.append(call(*arguments) if call else Inert(function.kind, arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        found = self.stack[-1]
        if isinstance(found, Inert) and found.arguments is not None:
            vars(found).update(state if isinstance(state, dict) else {"state": state})
        elif found is None or isinstance(found, Inert):
            raise ValueError("attributes are set on a name")
        # The attributes of anything else, such as a tensor's or an ordered dict's, are not read.

    def _setitems(self, pair: Sequence[Any] = ()) -> None:
        items = pair or self.pop_mark()  # type: ignore[attr-defined]
        found = self.stack[-1]
        if type(found) is not dict:
            raise ValueError("items are set in what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[_key(key)] = value

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,  # of a class and its arguments
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: lambda self: self._setitems([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: _setitems,
    }


def _key(value: Any) -> Any:
    """Returns a value that may be a key.

    A file can choose large numbers, and tuples of numbers, whose hashes collide: a dict of them
    takes quadratic time. Nobody looks such a key up, so a record takes its place, whose hash no
    file can foresee.
    """
    if type(value) in (str, bytes, bool, type(None), Inert):
        return value
    is_small = type(value) is int and abs(value) < SMALL_KEY
    return value if is_small else Inert("key", (value,))


def _size(sizes: Any) -> tuple[Any, ...]:
    if len(sizes) > MOST_DIMS:  # many copies of a long list would need endless memory
        raise ValueError(f"a torch.Size has more than {MOST_DIMS} dims")
    return tuple(sizes)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    if not isinstance(storage, Tensor) or not len(stride) == len(shape) <= MOST_DIMS:
        raise ValueError(f"a tensor has no storage, or more than {MOST_DIMS} dims")
    if any(type(one) is not int for one in (offset, *shape, *stride)):
        raise ValueError("a tensor has sizes that are no numbers")
    # torch raises RuntimeError for what lies outside of the storage.
    found = storage.as_strided(shape, stride, offset)
    # A tensor that repeats its elements would become larger than the file.
    if found.numel() > storage.numel():
        raise ValueError(f"a tensor of shape {shape} repeats its numbers")
    return found


CALLS: dict[str, Callable[..., Any]] = {
    "collections.defaultdict": lambda *_: {},
    "collections.OrderedDict": lambda: {},
    "torch.Size": _size,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    # a tensor that torch saved with its Python attributes, which are left out
    "torch._tensor._rebuild_from_type_v2": lambda made, _, given, *__: CALLS[made.kind](
        *given[:MOST_ARGUMENTS]
    ),
}
