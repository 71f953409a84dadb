"""The formats of weights that `python -m megatron_lite.tools.convert` reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_lite.convert.format_names import HF, MEGATRON, MEGATRON_DIST, NATIVE
from megatron_lite.convert.hf_source import HfSource
from megatron_lite.convert.hf_target import HfTarget
from megatron_lite.convert.megatron.dist_source import dist_source
from megatron_lite.convert.megatron.dist_target import DistTarget
from megatron_lite.convert.megatron.legacy_source import legacy_source
from megatron_lite.convert.megatron.legacy_target import LegacyTarget
from megatron_lite.convert.native_source import NativeSource
from megatron_lite.convert.native_target import NativeTarget
from megatron_lite.convert.weight_formats import WeightSource, WeightTarget


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The command line's settings of a target.

    tp_size, pp_size: over how many ranks the files split the model.
    hf_family: the Hugging Face family to write; None: one that expresses the model.
    """

    tp_size: int = 1
    pp_size: int = 1
    hf_family: str | None = None


class Format(NamedTuple):
    """One format.

    source: opens weights of this format. It raises InputError if they are of another format.
    target: a place for weights of this format, which does not exist yet.
    is_split: whether the format's files can be split over ranks.
    """

    source: Callable[[Path], WeightSource]
    target: Callable[[Path, TargetOptions], WeightTarget]
    is_split: bool = True


def _native(path: Path, options: TargetOptions) -> WeightTarget:
    return NativeTarget(path, tp_size=options.tp_size, pp_size=options.pp_size)


def _hf(path: Path, options: TargetOptions) -> WeightTarget:
    return HfTarget(path, family=options.hf_family)


def _megatron(path: Path, options: TargetOptions) -> WeightTarget:
    return LegacyTarget(path, tp_size=options.tp_size, pp_size=options.pp_size)


def _megatron_dist(path: Path, options: TargetOptions) -> WeightTarget:
    return DistTarget(path)


FORMATS: dict[str, Format] = {
    HF: Format(HfSource, _hf, is_split=False),
    NATIVE: Format(NativeSource, _native),
    MEGATRON: Format(legacy_source, _megatron),
    MEGATRON_DIST: Format(dist_source, _megatron_dist, is_split=False),
}
