"""Reads what Linux tells about the processor, and says how well torch multiplies 16-bit matrices
there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
MOST_CHARACTERS = 2**14  # the first processor takes about 2,000; a machine has up to hundreds
# oneDNN, to which torch sends 16-bit products, wants all of them, or an AVX2 that converts bf16.
AVX_512 = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq"))
CONVERTS_BF16 = "avx_ne_convert"


def facts(cpuinfo: Path = CPUINFO) -> Mapping[str, str]:
    """Returns what `cpuinfo` tells about the first processor; nothing if it cannot be read."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MOST_CHARACTERS)
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        found[name.strip()] = value.strip()
    return found


def vendor(found: Mapping[str, str]) -> str:
    """Returns the vendor of a processor; "" if it is not known."""
    # A checkpoint stores the name, and its reader takes printable text only.
    name = found.get("vendor_id", "")
    return name if name.isprintable() else ""


def flags(found: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of what a processor can do."""
    return frozenset(found.get("flags", "").split())


def has_avx2_alone(cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether the first processor has AVX2, and nothing that oneDNN wants for 16 bits."""
    names = flags(facts(cpuinfo))
    return "avx2" in names and not names >= AVX_512 and CONVERTS_BF16 not in names


@cache
def lacks_16_bit_products() -> bool:
    """Returns whether torch's 16-bit matrix products are slow loops on this machine.

    They took up to a hundred times as long as float32 ones (docs/performance.md).
    """
    return has_avx2_alone()
