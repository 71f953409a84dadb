"""A file of torch.save is read without running its code: every malicious or damaged one is refused
with one error, and nothing of it has run."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import pickle
import pickletools
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.convert.megatron import pickles
from megatron_lite.convert.megatron.pickles import Name, PickledObject, read_pickle
from megatron_lite.convert.megatron.torch_file import CALLS, StoredTensor, TorchFile, Window

SENTINEL = "ran.txt"


def archive(path: Path, data: bytes, **members: bytes) -> Path:
    """Writes a zip archive as torch.save does, with a pickle of the test's choice."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", data)
        file.writestr("a/byteorder", b"little")
        for name, contents in members.items():
            file.writestr(f"a/data/{name}", contents)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    """The opcodes that import a name."""
    return f"c{module}\n{attribute}\n".encode()


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def evil_pickles() -> dict[str, bytes]:
    run = text(f"touch {SENTINEL}") + b"\x85R."
    inside = {"model": {"weight": Evil(os.system, f"touch {SENTINEL}")}}
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0")
    return {
        "os.system": b"\x80\x02" + name("os", "system") + run,
        "posix.system": b"\x80\x02" + name("posix", "system") + run,
        "a value deep inside": pickle.dumps(inside, protocol=2),
        "protocol 4": pickle.dumps(inside, protocol=4),
        "protocol 0": pickle.dumps(inside, protocol=0),
        "eval": b"\x80\x02" + name("builtins", "eval") + run,
        "a class": b"\x80\x02" + name("subprocess", "Popen") + text("true") + b"\x85\x81.",
        "INST": f"(S'touch {SENTINEL}'\nios\nsystem\n.".encode(),
        "OBJ": b"(" + name("os", "system") + text("true") + b"o.",
        "an extension": b"\x80\x02\x82\x01.",
        "a nested attribute": b"\x80\x04"
        + text("torch")
        + text("serialization.os.system")
        + b"\x93"
        + run,
        "an attribute of an allowed module": b"\x80\x04"
        + text("megatron.core")
        + text("utils.os.system")
        + b"\x93"
        + run,
        "torch's own loader": b"\x80\x02" + name("torch", "load") + run,
        "torch.hub": b"\x80\x02" + name("torch.hub", "load") + run,
        "torch.jit": b"\x80\x02" + name("torch.jit", "script") + run,
        "torch's library of C": b"\x80\x02" + name("torch._C", "_load_library") + run,
        "functools.partial": b"\x80\x02" + name("functools", "partial") + run,
        "BUILD on a name": b"\x80\x02"
        + name("argparse", "Namespace")
        + b"}"
        + text("__init__")
        + name("argparse", "Namespace")
        + b"sb.",
        "a call of a value": b"\x80\x02" + text("os.system") + run,
        "a call of a record": b"\x80\x02" + name("argparse", "Namespace") + b")R" + run,
        "a pickled unpickler": b"\x80\x02" + name("_pickle", "loads") + run,
        "arguments that are no tuple": b"\x80\x02" + name("argparse", "Namespace") + b"]R.",
        "a mark as a value": b"\x80\x02(\x85.",
        "an empty stack": b"\x80\x02R.",
        "a memo that is not set": b"\x80\x02h\x07.",
        "no end": b"\x80\x02]",
        "a list as a key": b"\x80\x02}]Ns.",
        "a deep key": b"\x80\x02}" + b")" + b"\x85" * 60 + b"Ns.",
        "a member of no list": b"\x80\x02}Na.",
        "a persistent id of protocol 0": b"Pstorage\n.",
        "a storage that is not there": b"\x80\x02" + storage + text("cpu") + b"K\x04tQ.",
        "a text that is longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
        "a number that is longer than the file": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    }


@pytest.mark.parametrize("kind", evil_pickles())
def test_a_malicious_or_damaged_pickle_is_one_error_and_runs_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "evil.pt", evil_pickles()[kind])
    with pytest.raises(InputError) as error:
        TorchFile(Window(path))
    assert str(path) in str(error.value) and not (tmp_path / SENTINEL).exists()
    if kind in ("os.system", "posix.system", "a value deep inside", "functools.partial"):
        assert "asks for" in str(error.value) and "Megatron" in str(error.value)


def test_each_opcode_of_a_real_call_is_needed(tmp_path: Path, monkeypatch: Any) -> None:
    """The same pickle does run in Python's own machine, so the tests above show something."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(evil_pickles()["a value deep inside"])
    assert (tmp_path / SENTINEL).exists()


def _tensor(numel: int, *, offset: int = 0, shape: Any = (4,), stride: Any = (1,)) -> bytes:
    """A pickle of one tensor in storage 0 with `numel` numbers."""
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, torch.UntypedStorage):
                return None
            return ("storage", torch.FloatStorage, "0", "cpu", numel)

    storage = torch.UntypedStorage(4)
    rebuild = torch._utils._rebuild_tensor_v2
    arguments = (storage, offset, shape, stride, False, collections.OrderedDict())
    Pickler(buffer, 2).dump(Evil(rebuild, *arguments))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "case",
    [
        dict(numel=2**40),
        dict(numel=-1),
        dict(numel=4, offset=1),
        dict(numel=4, offset=-1),
        dict(numel=4, shape=(5,)),
        dict(numel=4, shape=(2**40,), stride=(0,)),
        dict(numel=4, shape=(2, 2), stride=(1,)),
        dict(numel=4, shape=(1,) * 9, stride=(1,) * 9),
        dict(numel=4, shape=(2, 2), stride=(4, 1)),
        dict(numel=4, shape=(-1,)),
        dict(numel=4, shape=("a",)),
    ],
)
def test_a_tensor_outside_of_its_storage_is_refused(case: dict[str, Any], tmp_path: Path) -> None:
    path = archive(tmp_path / "t.pt", _tensor(**case), **{"0": bytes(16)})
    with pytest.raises(InputError, match="cannot be read"):
        TorchFile(Window(path))


def test_the_tensor_of_the_cases_above_can_be_read(tmp_path: Path) -> None:
    contents = struct.pack("<4f", 1, 2, 3, 4)
    found = TorchFile(Window(archive(tmp_path / "t.pt", _tensor(4), **{"0": contents}))).value
    assert isinstance(found, StoredTensor) and found.read().tolist() == [1, 2, 3, 4]


def test_bombs_of_operations_and_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MOST_OPCODES", 1000)
    with pytest.raises(InputError, match="more than 1000 operations"):
        read_pickle(b"\x80\x02" + b"]q\x00" * 1000 + b".", "f", calls={})
    most = pickles.MOST_BYTES
    with pytest.raises(InputError, match=f"longer than {most} bytes"):
        read_pickle(bytes(most + 1), "f", calls={})


def test_nested_references_cost_no_time() -> None:
    """Each list holds the one before it twice: 2^60 values, if anybody walked through them."""
    data = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60)
    )
    found = read_pickle(data + b".", "f", calls={})
    assert found[0] is found[1]


def test_python_s_own_pickles_of_plain_values_are_read_alike() -> None:
    value = {
        "numbers": [0, -1, 300, 2**40, -(2**70), 1.5, True, None],
        "texts": ("a", "ä" * 300, b"bytes", bytearray(b"more")),
        ("a", 1): [{}, [], (), {1, 2}, frozenset((3,))],
        "ordered": collections.OrderedDict(a=1),
        "shape": torch.Size((2, 3)),
    }
    expected = {**value, "shape": (2, 3)}
    for protocol in (2, 3, 4, 5):
        plain = dict(value)
        if protocol < 5:
            plain["texts"] = expected["texts"] = value["texts"][:2]
            plain[("a", 1)] = expected["a", 1] = [{}, [], ()]
        else:
            expected = {**value, "shape": (2, 3)}
        # A number in a key becomes a text, whose hash no file can foresee.
        expected["a", "1"] = expected.pop(("a", 1))
        assert read_pickle(pickle.dumps(plain, protocol=protocol), "f", calls=CALLS) == expected


def test_objects_become_records_and_names() -> None:
    data = pickle.dumps(argparse.Namespace(a=1, path=Path("/x")), protocol=2)
    found = read_pickle(data, "f", calls={})
    assert isinstance(found, PickledObject) and found.kind == "argparse.Namespace"
    assert found.fields["a"] == 1 and found.fields["path"].kind == "pathlib.PosixPath"
    assert read_pickle(name("signal", "Signals") + b".", "f", calls={}) == Name("signal.Signals")


def is_allowed(opcode: pickletools.OpcodeInfo) -> bool:
    """Reads a pickle of this operation alone, with an argument of its kind."""
    for argument in (bytes(16), b"0\n0\n", b"''\n"):
        with contextlib.suppress(ValueError):
            data = opcode.code.encode("latin-1") + argument
            assert next(pickletools.genops(data))[0] is opcode
            with pytest.raises(InputError) as error:
                read_pickle(data, "f", calls={})
            return f"the operation {opcode.name} is not allowed" not in str(error.value)
    pytest.fail(f"no argument for {opcode.name}")


def test_every_operation_of_pickletools_is_allowed_or_refused_by_intent() -> None:
    """A new opcode of Python is refused until somebody has thought about it."""
    refused = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER"}
    assert {one.name for one in pickletools.opcodes if not is_allowed(one)} == refused


def test_an_old_file_of_torch_and_other_kinds_are_named(tmp_path: Path) -> None:
    old, tar, cut, empty = (tmp_path / f"{kind}.pt" for kind in ("old", "tar", "cut", "empty"))
    torch.save({"a": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    with tarfile.open(tar, "w") as file:
        file.addfile(tarfile.TarInfo("storages"))
    torch.save({"a": torch.ones(300)}, cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    empty.touch()
    for path, message in (
        (old, "older file of torch.save"),
        (tar, "older file of torch.save"),
        (cut, "incomplete or damaged"),
        (empty, "no zip archive"),
        (tmp_path / "none.pt", "cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            TorchFile(Window(path))


def test_a_compressed_or_big_endian_or_empty_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", bytes(10**6))
    with pytest.raises(InputError, match="compressed"):
        TorchFile(Window(path))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"N.")
        file.writestr("a/byteorder", b"big")
    with pytest.raises(InputError, match="little-endian"):
        TorchFile(Window(path))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/other", b"")
    with pytest.raises(InputError, match=r"0 members data\.pkl"):
        TorchFile(Window(path))


def test_a_member_that_claims_more_bytes_than_the_file_has_is_refused(tmp_path: Path) -> None:
    """Else a small file could ask for any amount of memory."""
    path = archive(tmp_path / "t.pt", _tensor(2**28), **{"0": bytes(16)})
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")  # that of the storage in the central directory
    struct.pack_into("<I", data, entry + 24, 2**30)
    path.write_bytes(data)
    with pytest.raises(InputError, match="longer than the file"):
        TorchFile(Window(path))


def test_tensors_of_every_dtype_and_layout_are_torch_s(tmp_path: Path) -> None:
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
    torch.save(values, tmp_path / "t.pt")
    found = TorchFile(Window(tmp_path / "t.pt")).value
    for key, value in values.items():
        read = found[key].read()
        assert read.dtype == value.dtype and torch.equal(read, value.detach()), key
        assert torch.equal(found[key].head(5), value.detach().flatten()[:5]), key
