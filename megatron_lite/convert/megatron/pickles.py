"""Reads a pickle as plain values, without importing or calling anything that it names.

A pickle is a program for a stack machine. Python's machine imports the functions that a pickle
names and calls them, so a file can run any code. Here the operations are scanned first: only known
ones pass, and not too many. Then Python's machine runs with each operation replaced that imports,
calls, sets attributes or makes keys. A name becomes a `Name`, and a call of a name a
`PickledObject` of the name and its arguments. Any other name is refused, so that a file of another
kind fails at once.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron_lite.checkpointing.shards import MOST_DIMS
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted

MOST_BYTES = 2**28  # of one pickle; tensors are stored outside of it
MOST_OPCODES = 2 * 10**7  # each makes one small object at most
MOST_KEY_PARTS = MOST_ARGUMENTS = 16
SMALL_KEY = 2**20  # optimizer states are numbered from 0
LONGEST_NAME = 512
NEWEST_PROTOCOL = 5
# Of the operations that torch and Megatron-LM do not write, those that call, make keys, or ask for
# something outside of the file. Those of protocol 0 spell numbers as texts, which takes quadratic
# time, so of them only names pass.
REFUSED = frozenset(
    (
        *("OBJ", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "NEWOBJ_EX", "DICT"),
        *("EMPTY_SET", "ADDITEMS", "FROZENSET"),
    )
)
# Every name in these modules and in their submodules becomes a record, and so do the single names.
MODULES = (
    *("megatron", "transformer_engine", "apex", "pathlib", "signal", "numpy", "datetime"),
    *("torch.distributed.checkpoint", "torch.distributed._shard"),
)
STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.storage.UntypedStorage": torch.uint8,
}
BUILTINS = ("list", "dict", "int", "float", "str", "tuple", "getattr", "set", "bytearray")
NAMES = frozenset(
    (
        *("argparse.Namespace", "types.SimpleNamespace", "_codecs.encode", "_io.BytesIO"),
        *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in BUILTINS),
        *("torch.device", "torch.Tensor", "torch._utils._rebuild_tensor_v3", "builtins.complex"),
        *("torch.serialization._get_layout", "torch.nn.parameter.Parameter"),
        *STORAGES,
        *(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)),
    )
)


@dataclass(frozen=True)
class Name:
    """A name that a pickle imports, such as "torch.FloatStorage". Nothing is imported for it."""

    text: str


@dataclass(eq=False, repr=False)
class PickledObject:
    """An object whose class is not loaded.

    kind: the name of the class.
    arguments: what the class was called with.
    state: what the pickle gives the object afterwards, usually its fields as a dict.
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[Any, Any]:
        """The fields by name; empty if the state is of another form."""
        return self.state if isinstance(self.state, dict) else {}


Call = Callable[..., Any]
PLAIN_KEYS = (str, bytes, bool, type(None), Name, PickledObject)


def read_pickle(
    data: bytes,
    where: str,
    *,
    calls: Mapping[str, Call] | None = None,
    persistent_load: Call | None = None,
) -> Any:
    """Returns the value that a pickle describes. No name in the pickle is imported or called.

    where: the file, for errors.
    calls: by name, this project's functions that take the place of the named ones, beside CALLS.
    persistent_load: returns the value for a persistent id, which torch uses for storages.
    Raises InputError if the pickle names anything else, or is damaged, or is too large.
    """
    with crafted(f"{where}: its pickle"):
        _scan(data)
        machine = _Machine(io.BytesIO(data))
        machine.where = where
        machine.calls = {**CALLS, **(calls or {})}
        machine.persistent_load = persistent_load  # type: ignore[assignment,method-assign]
        return machine.load()


def _scan(data: bytes) -> None:
    """Raises InputError for more bytes or operations than a checkpoint has, and ValueError for an
    operation that is not allowed. It also finds texts and numbers that are cut off."""
    if len(data) > MOST_BYTES:
        raise InputError(f"a pickle is longer than {MOST_BYTES} bytes: it is not read")
    for count, (opcode, _, _) in enumerate(pickletools.genops(data)):
        if count > MOST_OPCODES:
            raise InputError(f"a pickle has more than {MOST_OPCODES} operations: it is not read")
        is_text = opcode.proto == 0 and opcode.arg is not None and opcode.name != "GLOBAL"
        if is_text or opcode.name in REFUSED or opcode.proto > NEWEST_PROTOCOL:
            raise ValueError(f"the operation {opcode.name} is not allowed")


class _Machine(pickle._Unpickler):
    """Python's machine without imports, calls and attributes, and with keys that cost no time."""

    where: str
    calls: Mapping[str, Call]
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        inert = full in NAMES or any(f"{module}.".startswith(f"{one}.") for one in MODULES)
        if full not in self.calls and (not inert or "." in name or len(full) > LONGEST_NAME):
            raise InputError(
                f"{self.where}: asks for {full[:200]!r}, which is no part of a Megatron "
                "checkpoint. A pickle can run code through such a name, so nothing of the file "
                "was run or read further: do not open it with torch.load either, unless you "
                "trust its origin"
            )
        return Name(full)

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or type(arguments) is not tuple:
            raise ValueError("it calls what is no name")
        if len(arguments) > MOST_ARGUMENTS:  # many calls with a long list would take endless time
            raise ValueError(f"it calls a name with {len(arguments)} arguments")
        call = self.calls.get(function.text)
        self.stack.append(PickledObject(function.text, arguments) if not call else call(*arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        found = self.stack[-1]
        if isinstance(found, PickledObject):
            found.state = state
        elif isinstance(found, Name) or found is None:
            raise ValueError("attributes are set on a name")
        # The attributes of anything else, such as a tensor's or an ordered dict's, are not read.

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self.pop_mark())  # type: ignore[attr-defined]

    def _set(self, items: list[Any]) -> None:
        found = self.stack[-1]
        if type(found) is not dict or len(items) % 2:
            raise ValueError("items are set in what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[_key(key)] = value

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,  # of a class and its arguments
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
    }


def _key(value: Any) -> Any:
    """Returns a value that may be a key.

    A file can choose large numbers, and tuples of numbers, whose hashes collide: a dict of them
    takes quadratic time. So these keys become texts, whose hash no file can foresee. A tuple may be
    nested so deeply that its text or hash takes for ever, and such a key is refused.
    """
    kind = type(value)
    if kind in PLAIN_KEYS or (kind is int and abs(value) < SMALL_KEY):
        return value
    parts = value if kind is tuple else (value,)
    if len(parts) <= MOST_KEY_PARTS and {*map(type, parts)} <= {*PLAIN_KEYS, int, float}:
        # not the text of the whole tuple: it may have one long text many times
        return tuple(str(one) if type(one) in (int, float) else one for one in parts)
    raise ValueError(f"a {kind.__name__} is used as a key")


def _size(sizes: Any) -> tuple[Any, ...]:
    if len(sizes) > MOST_DIMS:  # many copies of a long list would need endless memory
        raise ValueError(f"a torch.Size has more than {MOST_DIMS} dims")
    return tuple(sizes)


CALLS: dict[str, Call] = {
    "collections.defaultdict": lambda *_: {},
    "collections.OrderedDict": lambda: {},
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
}
