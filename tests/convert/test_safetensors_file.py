"""The safetensors writer: what it writes tensor by tensor is what the library reads."""

import json

import torch
from safetensors.torch import load_file

from megatron_lite.convert.target import create_files
from tests.support.conversions import same_weights

MIXED = {
    "odd 16 bits": torch.randn(3).to(torch.bfloat16),
    "64 bits": torch.randn(2, 3, dtype=torch.float64),
    "odd 32 bits": torch.randn(5),
    "more 16 bits": torch.randn(7, 3).to(torch.float16),
    "32 bits": torch.randn(4, 6).t(),
    "empty": torch.randn(0, 4),
}


def test_any_order_of_dtypes_is_read_back_bit_for_bit(tmp_path):
    """Every tensor begins at a multiple of its element size, in the file."""
    for shift in range(len(MIXED)):
        names = [*list(MIXED)[shift:], *list(MIXED)[:shift]]
        path = tmp_path / f"{shift}.safetensors"
        entries = {name: (MIXED[name].dtype, tuple(MIXED[name].shape)) for name in names}
        write = create_files(tmp_path, {path.name: entries}, {}, {"format": "pt"})
        for name in reversed(names):
            write(name, MIXED[name])
        read = load_file(path)
        assert same_weights(read, MIXED)
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, row in header.items():
            assert (start + row["data_offsets"][0]) % MIXED[name].element_size() == 0
