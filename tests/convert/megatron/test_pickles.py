"""A file of torch.save is read without running its code: every malicious or damaged one is refused
with one error, and nothing of it has run."""

import argparse
import collections
import io
import os
import pickle
import pickletools
import signal
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.convert.megatron import torch_file
from megatron_lite.convert.megatron.torch_file import Inert, Window, read_pickle, read_torch_file
from tests.support.pairs import in_one_test

SENTINEL = "ran.txt"


def archive(path, data, **members):
    """Writes a zip archive as torch.save does, with a pickle of the test's choice."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", data)
        file.writestr("a/byteorder", b"little")
        for name, contents in members.items():
            file.writestr(f"a/data/{name}", contents)
    return path


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module, attribute):
    """The opcodes that import a name."""
    return f"c{module}\n{attribute}\n".encode()


def read(path):
    return read_torch_file(Window(path))


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


INSIDE = {"model": {"weight": Evil(os.system, f"touch {SENTINEL}")}}
RUN = text(f"touch {SENTINEL}") + b"\x85R."
RECORD = name("argparse", "Namespace")
STORAGE = b"(" + text("storage") + name("torch", "FloatStorage") + text("0")
# Names that run code, some of them attributes of what is allowed.
NAMES = (
    *("os system", "builtins eval", "torch load", "torch._C _load_library", "functools partial"),
    *("torch serialization.os.system", "megatron.core utils.os.system"),
)
EVIL = {
    **{one: b"\x80\x04" + b"".join(map(text, one.split())) + b"\x93" + RUN for one in NAMES},
    **{f"protocol {one}": pickle.dumps(INSIDE, protocol=one) for one in (0, 2, 4)},
    "GLOBAL": b"\x80\x02" + name("os", "system") + RUN,
    "a class": b"\x80\x02" + name("subprocess", "Popen") + text("true") + b"\x85\x81.",
    "INST": f"(S'touch {SENTINEL}'\nios\nsystem\n.".encode(),
    "OBJ": b"(" + name("os", "system") + text("true") + b"o.",
    "an extension": b"\x80\x02\x82\x01.",
    "BUILD on a name": b"\x80\x02" + RECORD + b"}" + text("__init__") + RECORD + b"sb.",
    "a call of a value": b"\x80\x02" + text("os.system") + RUN,
    "a call of a record": b"\x80\x02" + RECORD + b")R" + RUN,
    "arguments that are no tuple": b"\x80\x02" + RECORD + b"]R.",
    "many arguments": b"\x80\x02" + RECORD + b"(" + b"N" * 17 + b"tR.",
    "a long size": b"\x80\x02" + name("torch", "Size") + b"(" + b"K\x01" * 9 + b"t\x85R.",
    "an empty stack": b"\x80\x02R.",
    "a memo that is not set": b"\x80\x02h\x07.",
    "no end": b"\x80\x02]",
    "a persistent id of protocol 0": b"Pstorage\n.",
    "a storage that is not there": b"\x80\x02" + STORAGE + text("cpu") + b"K\x04tQ.",
    "a text that is longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a number that is longer than the file": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
}


@in_one_test("kind", EVIL)
def test_a_malicious_or_damaged_pickle_is_one_error_and_runs_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "evil.pt", EVIL[kind])
    with pytest.raises(InputError) as error:
        read(path)
    assert str(path) in str(error.value) and not (tmp_path / SENTINEL).exists()
    if kind in NAMES:
        assert "asks for" in str(error.value) and "Megatron" in str(error.value)


def _tensor(numel, *, offset=0, shape=(4,), stride=(1,)):
    """A pickle of one tensor in storage 0 with `numel` numbers."""
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            if not isinstance(value, torch.UntypedStorage):
                return None
            return ("storage", torch.FloatStorage, "0", "cpu", numel)

    storage = torch.UntypedStorage(4)
    rebuild = torch._utils._rebuild_tensor_v2
    arguments = (storage, offset, shape, stride, False, collections.OrderedDict())
    Pickler(buffer, 2).dump(Evil(rebuild, *arguments))
    return buffer.getvalue()


@in_one_test(
    "case",
    [
        dict(numel=2**40),
        dict(numel=-1),
        dict(numel=4, offset=-1),
        dict(numel=4, shape=(5,)),
        dict(numel=4, shape=(2**40,), stride=(0,)),
        dict(numel=4, shape=(1,) * 9, stride=(1,) * 9),
        dict(numel=4, shape=(2, 2), stride=(4, 1)),
        dict(numel=4, shape=("a",)),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(case, tmp_path):
    """The bytes beside the storage are other members and the end of the archive."""
    contents = struct.pack("<4f", 1, 2, 3, 4)
    good = read(archive(tmp_path / "good.pt", _tensor(4), **{"0": contents}))
    assert good.tolist() == [1, 2, 3, 4]
    path = archive(tmp_path / "t.pt", _tensor(**case), **{"0": contents, "1": bytes(64)})
    with pytest.raises(InputError, match="cannot be read"):
        read(path)


def test_bombs_of_operations_and_bytes_are_refused(monkeypatch):
    monkeypatch.setattr(torch_file, "MOST_OPERATIONS", 1000)
    monkeypatch.setattr(torch_file, "MOST_BYTES", 10_000)
    for data, message in (
        (b"\x80\x02" + b"]q\x00" * 1000 + b".", "more than 1000 operations"),
        (bytes(10_001), "longer than 10000 bytes"),
    ):
        with pytest.raises(InputError, match=message):
            read_pickle(data, "f")


def test_python_s_own_pickles_of_plain_values_are_read_alike():
    plain = {
        "numbers": [0, -1, 300, 2**40, -(2**70), 1.5, True, None],
        "texts": ("a", "\u00e4" * 300, b"bytes"),
        "nested": [{}, [], ()],
        "ordered": collections.OrderedDict(a=1),
        "shape": torch.Size((2, 3)),
    }
    record = argparse.Namespace(a=1, path=Path("/x"), kind=signal.SIGTERM)
    for protocol in (2, 3, 4, 5):
        values, keys, made = read_pickle(
            pickle.dumps([plain, {("a", 1): 2}, record], protocol), "f"
        )
        if protocol > 2:  # which has no bytes, and calls a function that makes them
            assert values == plain
        assert [*keys.values()] == [2]  # under a record: no file can foresee its hash
        assert isinstance(made, Inert) and made.kind == "argparse.Namespace"
        assert made.a == 1 and made.path.kind.endswith("PosixPath")


def test_an_operation_that_nobody_has_thought_about_is_refused():
    """Of those allowed, each that can import, call, set or make a key is replaced."""
    opcodes = {one.name: one.code.encode("latin-1") for one in pickletools.opcodes}
    base, ours = pickle._Unpickler.dispatch, torch_file._Machine.dispatch  # type: ignore[attr-defined]
    allowed = {one for one in opcodes if torch_file.OPERATIONS.fullmatch(one)}
    replaced = {one for one in allowed if base[opcodes[one][0]] is not ours[opcodes[one][0]]}
    assert replaced == {"REDUCE", "NEWOBJ", "BUILD", "SETITEM", "SETITEMS"}
    # The others end in find_class or persistent_load, which are ours too, or move plain values.
    assert len(allowed - replaced) == 43
    for operation in opcodes.keys() - allowed:
        with pytest.raises(InputError, match=f"{operation} is not allowed|cannot be read"):
            read_pickle(opcodes[operation] + b"1\n1\n\x01\x01.".ljust(99, b"\0"), "f")


def test_files_of_other_kinds_are_named(tmp_path):
    old, cut, empty, big, other = (tmp_path / f"{number}.pt" for number in range(5))
    torch.save({"a": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(300)}, cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    empty.touch()
    for path, members in (
        (big, {"a/data.pkl": b"N.", "a/byteorder": b"big"}),
        (other, {"a/other": b""}),
    ):
        with zipfile.ZipFile(path, "w") as archived:
            for member, contents in members.items():
                archived.writestr(member, contents)
    for path, message in (
        (old, "older file of torch.save"),
        (cut, "incomplete or damaged"),
        (empty, "cannot mmap an empty file"),
        (tmp_path / "none.pt", "cannot be read"),
        (big, "little-endian"),
        (other, "cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            read(path)


@in_one_test("member", [b"data.pkl", b"data/0"])
def test_a_member_that_is_packed_or_claims_more_bytes_than_there_are_is_refused(member, tmp_path):
    """Else a small file could ask for any amount of memory."""
    path = archive(tmp_path / "t.pt", _tensor(4), **{"0": bytes(16)})
    data = path.read_bytes()
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(member))  # in the central directory
    for place, value, message in ((10, b"\x08", "compressed"), (26, b"\x40", "longer than")):
        start = entry + place
        path.write_bytes(data[:start] + value + data[start + 1 :])
        with pytest.raises(InputError, match=message):
            read(path)


def test_tensors_of_every_dtype_and_layout_are_torch_s(tmp_path):
    """Also inside another file, at an odd place."""
    whole = torch.arange(24.0).view(4, 6)
    parameter = torch.nn.Parameter(whole.clone())
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    values = {
        **{str(dtype): whole.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.int8)},
        "transposed": whole.t(),
        "part": whole[1:3, 2:],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5),
        "parameter": parameter,
        "shared": whole,
    }
    path = tmp_path / "t.pt"
    torch.save(values, path)
    saved = path.read_bytes()
    (tmp_path / "outer").write_bytes(b"abc" + saved + b"defgh")
    for window in (Window(path), Window(tmp_path / "outer", 3, len(saved))):
        found = read_torch_file(window)
        for key, value in values.items():
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value.detach()), key


def test_a_part_of_a_file_reaches_no_other_part(tmp_path):
    """A directory may name members before its part: small parts could then hold large tensors."""
    first = archive(tmp_path / "first", _tensor(4), **{"0": bytes(16)}).read_bytes()
    directory = first[first.index(b"PK\x01\x02") :]
    start = len(first)
    # an archive of no members whose directory is that of the first one
    (tmp_path / "both").write_bytes(first + b"PK\x03\x04" + directory)
    with pytest.raises(InputError):
        read_torch_file(Window(tmp_path / "both", start, 4 + len(directory)))
