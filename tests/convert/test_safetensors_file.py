"""The safetensors writer: what it writes tensor by tensor is what the library reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_lite.convert.target import safetensors_files

MIXED = {
    "odd 16 bits": torch.randn(3).to(torch.bfloat16),
    "64 bits": torch.randn(2, 3, dtype=torch.float64),
    "odd 32 bits": torch.randn(5),
    "more 16 bits": torch.randn(7, 3).to(torch.float16),
    "32 bits": torch.randn(4, 6).t(),
    "empty": torch.randn(0, 4),
}


def written(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write = safetensors_files({path: entries}, {"format": "pt"})
    for name, tensor in reversed(tensors.items()):
        write(name, tensor)


def test_any_order_of_dtypes_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    """Every tensor begins at a multiple of its element size, in the file."""
    for shift in range(len(MIXED)):
        names = [*list(MIXED)[shift:], *list(MIXED)[:shift]]
        path = tmp_path / f"{shift}.safetensors"
        written(path, {name: MIXED[name] for name in names})
        read = load_file(path)
        assert read.keys() == MIXED.keys()
        assert all(
            read[name].dtype == MIXED[name].dtype and torch.equal(read[name], MIXED[name])
            for name in names
        )
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        assert not [
            name
            for name in names
            if (start + header[name]["data_offsets"][0]) % MIXED[name].element_size()
        ]
        with safe_open(str(path), framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
