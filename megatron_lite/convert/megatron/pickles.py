"""Reads a pickle as plain values, without importing or calling anything that it names.

A pickle is a program for a stack machine. Python's own machine imports the functions that a pickle
names and calls them, so a file can run any code. The machine here has no import and no call. A name
becomes a `Name`, and a call of a name becomes a `PickledObject` of the name and its arguments. A
few names have an entry in a table of this project's functions, for example the one that describes a
tensor. Any name outside the tables is refused, so that a file of another kind fails at once.
"""

from __future__ import annotations

import gc
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError

MOST_BYTES = 2**28  # of one pickle; tensors are stored outside of it
MOST_OPCODES = 2 * 10**7  # each makes one small object at most
MOST_KEY_PARTS = MOST_ARGUMENTS = 16
SMALL_KEY, LARGEST_KEY = 2**20, 2**63  # optimizer states are numbered from 0
LONGEST_NAME = 512


@dataclass(frozen=True)
class Name:
    """A name that a pickle imports, such as "torch.FloatStorage". Nothing is imported for it."""

    text: str


class PickledObject:
    """An object whose class is not loaded.

    kind: the name of the class.
    arguments: what the class was called with.
    state: what the pickle gives the object afterwards, usually its fields as a dict.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = (), state: Any = None) -> None:
        self.kind, self.arguments, self.state = kind, arguments, state

    @property
    def fields(self) -> dict[Any, Any]:
        """The fields by name; empty if the state is of another form."""
        return self.state if isinstance(self.state, dict) else {}


class Inert(NamedTuple):
    """The names that become records.

    modules: every name in these modules and in their submodules.
    names: single names.
    """

    modules: tuple[str, ...]
    names: frozenset[str]


Call = Callable[..., Any]
PersistentLoad = Callable[[Any], Any]

INERT = Inert(
    modules=(
        *("megatron", "transformer_engine", "apex", "pathlib", "signal", "numpy", "datetime"),
        *("torch.distributed.checkpoint", "torch.distributed._shard"),
    ),
    names=frozenset(
        (
            *("argparse.Namespace", "types.SimpleNamespace", "_codecs.encode", "_io.BytesIO"),
            *(f"builtins.{kind}" for kind in ("list", "dict", "int", "float", "str", "tuple")),
            *("builtins.getattr", "builtins.set", "builtins.bytearray", "builtins.complex"),
            *("__builtin__.set", "__builtin__.getattr", "__builtin__.bytearray"),
            *("torch.device", "torch.Tensor", "torch._utils._rebuild_tensor_v3"),
            *("torch.serialization._get_layout", "torch.nn.parameter.Parameter"),
        )
    ),
)


def read_pickle(
    data: bytes,
    where: str,
    *,
    calls: Mapping[str, Call],
    inert: Inert = INERT,
    persistent_load: PersistentLoad | None = None,
) -> Any:
    """Returns the value that a pickle describes. No name in the pickle is imported or called.

    where: the file, for errors.
    calls: by name, this project's functions that take the place of the named ones.
    persistent_load: returns the value for a persistent id, which torch uses for storages.
    Raises InputError if the pickle names anything else, or is damaged, or is too large.
    """
    if len(data) > MOST_BYTES:
        raise InputError(f"{where}: its pickle is longer than {MOST_BYTES} bytes: it is not read")
    # Without this the garbage collector visits all new objects again and again: twice the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Machine(where, calls, inert, persistent_load).run(data)
    except InputError:
        raise
    except (
        *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
        *(struct.error, AssertionError, MemoryError),
    ) as error:
        raise InputError(
            f"{where}: its pickle cannot be read ({type(error).__name__}: {error}): the file is "
            "damaged or of another kind"
        ) from error
    finally:
        if collects:
            gc.enable()


_MARK = object()
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_IGNORED = frozenset(("PROTO", "FRAME"))


class _Machine:
    """The stack, the memo and the operations on them. One machine reads one pickle."""

    def __init__(
        self,
        where: str,
        calls: Mapping[str, Call],
        inert: Inert,
        persistent_load: PersistentLoad | None,
    ) -> None:
        self._where, self._calls, self._inert = where, calls, inert
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        # genops decodes the operations and carries none of them out.
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > MOST_OPCODES:
                raise InputError(
                    f"{self._where}: its pickle has more than {MOST_OPCODES} operations: it is not "
                    "read"
                )
            name = opcode.name
            if name == "STOP":
                return self._pop()
            if name in _LITERALS:
                self._stack.append(argument)
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name not in _IGNORED:
                handler = getattr(self, f"_op_{name.lower()}", None)
                if handler is None:
                    raise ValueError(f"the operation {name} is not allowed")
                handler(argument)
        raise ValueError("it does not end")

    # memo

    def _op_put(self, index: int) -> None:
        if index > MOST_OPCODES:
            raise ValueError("it remembers more than it has operations")
        self._memo[index] = self._top()

    _op_binput = _op_long_binput = _op_put

    def _op_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self._top()

    def _op_get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    _op_binget = _op_long_binget = _op_get

    # stack

    def _op_pop(self, _: None) -> None:
        self._stack.pop()

    def _op_pop_mark(self, _: None) -> None:
        self._marked()

    def _op_dup(self, _: None) -> None:
        self._stack.append(self._top())

    # containers

    def _op_tuple1(self, _: None) -> None:
        self._join(1)

    def _op_tuple2(self, _: None) -> None:
        self._join(2)

    def _op_tuple3(self, _: None) -> None:
        self._join(3)

    def _op_tuple(self, _: None) -> None:
        self._stack.append(tuple(self._marked()))

    def _op_list(self, _: None) -> None:
        self._stack.append(self._marked())

    def _op_dict(self, _: None) -> None:
        items = self._marked()
        self._stack.append({})
        self._set_items(items)

    def _op_frozenset(self, _: None) -> None:
        self._stack.append(frozenset(map(_key, self._marked())))

    def _op_append(self, _: None) -> None:
        self._extend([self._pop()])

    def _op_appends(self, _: None) -> None:
        self._extend(self._marked())

    def _op_additems(self, _: None) -> None:
        items = self._marked()
        found = self._top()
        if not isinstance(found, set):
            raise ValueError("members are added to what is no set")
        found.update(map(_key, items))

    def _op_setitem(self, _: None) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def _op_setitems(self, _: None) -> None:
        self._set_items(self._marked())

    # names and objects

    def _op_global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _op_stack_global(self, _: None) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name is no text")
        self._name(module, name)

    def _op_reduce(self, _: None) -> None:
        arguments, function = self._pop(), self._pop()
        self._stack.append(self._called(function, arguments))

    _op_newobj = _op_reduce  # of a class and its arguments, instead of a function and its own

    def _op_newobj_ex(self, _: None) -> None:
        if self._pop() != {}:
            raise ValueError("an object is made with keyword arguments")
        self._op_reduce(None)

    def _op_build(self, _: None) -> None:
        state, found = self._pop(), self._top()
        if isinstance(found, PickledObject):
            found.state = state
        elif isinstance(found, Name) or found is None:
            raise ValueError("attributes are set on a name")
        # The attributes of anything else, such as a tensor's or an ordered dict's, are not read.

    def _op_binpersid(self, _: None) -> None:
        found = self._pop()
        if self._persistent_load is None:
            raise ValueError("it refers to storages, and there are none")
        self._stack.append(self._persistent_load(found))

    def _name(self, module: str, name: str) -> None:
        if len(module) + len(name) > LONGEST_NAME:
            raise ValueError("it asks for a name that no class has")
        full = f"{module}.{name}"
        inert = full in self._inert.names or any(
            module == one or module.startswith(f"{one}.") for one in self._inert.modules
        )
        if full not in self._calls and (not inert or "." in name):
            raise InputError(
                f"{self._where}: asks for {full[:200]!r}, which is no part of a Megatron "
                "checkpoint. A pickle can run code through such a name, so nothing of the file "
                "was run or read further: do not open it with torch.load either, unless you "
                "trust its origin"
            )
        self._stack.append(Name(full))

    def _called(self, function: Any, arguments: Any) -> Any:
        if type(function) is not Name or type(arguments) is not tuple:
            raise ValueError("it calls what is no name")
        if len(arguments) > MOST_ARGUMENTS:
            raise ValueError(f"it calls a name with {len(arguments)} arguments")
        call = self._calls.get(function.text)
        return PickledObject(function.text, arguments) if call is None else call(*arguments)

    # parts of the operations

    def _pop(self) -> Any:
        found = self._stack.pop()
        if found is _MARK:
            raise ValueError("a mark is used as a value")
        return found

    def _top(self) -> Any:
        found = self._stack[-1]
        if found is _MARK:
            raise ValueError("a mark is used as a value")
        return found

    def _join(self, length: int) -> None:
        self._stack.append(tuple([self._pop() for _ in range(length)][::-1]))

    def _marked(self) -> list[Any]:
        """Removes and returns what lies above the last mark."""
        found = []
        while (value := self._stack.pop()) is not _MARK:
            found.append(value)
        found.reverse()
        return found

    def _extend(self, values: list[Any]) -> None:
        found = self._top()
        if type(found) is not list:
            raise ValueError("values are appended to what is no list")
        found.extend(values)

    def _set_items(self, items: list[Any]) -> None:
        found = self._top()
        if type(found) is not dict or len(items) % 2:
            raise ValueError("items are set in what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[_key(key)] = value


def _key(value: Any) -> Any:
    """Returns a value that may be a key.

    A file can choose large numbers, and tuples of numbers, whose hashes collide: a dict of them
    takes quadratic time. So these keys become texts, whose hash no file can foresee. The hash of a
    deeply nested tuple may take for ever, and such a key is refused.
    """
    if type(value) is tuple and len(value) <= MOST_KEY_PARTS:
        return tuple(_scalar_key(part, small=0) for part in value)
    return _scalar_key(value, small=SMALL_KEY)


def _scalar_key(value: Any, *, small: int) -> Any:
    kind = type(value)
    if kind in (str, bytes, bool, type(None), Name, PickledObject):
        return value
    if kind is float or (kind is int and abs(value) < LARGEST_KEY):
        return value if kind is int and abs(value) < small else str(value)
    raise ValueError(f"a {kind.__name__} is used as a key")
