"""The formats of weights that `python -m megatron_lite.tools.convert` reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_lite.convert.hf import hf_source, write_hf
from megatron_lite.convert.megatron.dist import dist_source, write_dist
from megatron_lite.convert.megatron.legacy import legacy_source, write_legacy
from megatron_lite.convert.native import native_source, write_native
from megatron_lite.convert.weights import WeightSource


class Format(NamedTuple):
    """One format.

    source: opens weights of this format. It raises InputError if they are of another format.
    write: writes weights in this format to a path that does not exist yet.
        It can be told over how many ranks the files split the model (`tp_size`, `pp_size`), or the
        `family` of Hugging Face, if it has such a parameter.
    """

    source: Callable[[Path], WeightSource]
    write: Callable[..., None]


FORMATS = {
    "hf": Format(hf_source, write_hf),
    "megatron-lite": Format(native_source, write_native),
    "megatron": Format(legacy_source, write_legacy),
    "megatron-dist": Format(dist_source, write_dist),
}
