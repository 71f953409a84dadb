"""Joins what the parts of gpu.sh wrote into one JSON file, and writes a page of it beside it.

python benchmarks/gpu_report.py PARTS FILE      PARTS: the folder with NAME.json and NAME.status
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("numpy", "pytest", "rich", "safetensors", "tokenizers", "transformers", "liger-kernel")
COLUMNS = {
    "name": "contestant",
    "dtype": "dtype",
    "dropout": "dropout",
    "ms": "forward and backward, ms",
    "ratio": "/ ours",
    "step_ms": "whole step, ms",
    "step_ratio": "/ ours",
    "peak_bytes": "peak, GiB",
    "of_matmuls": "of the matmul rate",
    "mfu": "MFU",
    "hfu": "HFU",
    "engine": "engine",
    "kept_bytes": "kept, GiB",
    "time_ratio": "time / none",
    "extra_flops": "FLOPs above none",
}


def git(*arguments: str) -> str | None:
    """Returns what git prints; None without git or a repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def version(package: str) -> str | None:
    """Returns the version of an installed package that can be imported."""
    try:
        __import__(package.replace("-", "_"))
        return importlib.metadata.version(package)
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return None


def joined(parts: Path) -> dict[str, Any]:
    """Returns the report: machine, versions, and of each part its status and what it wrote."""
    device: dict[str, Any] = {"name": platform.machine()}
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        device = {"name": found.name, "memory_bytes": found.total_memory}
    changes = git("status", "--porcelain")
    packages = {name: version(name) for name in PACKAGES}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changed_files": None if changes is None else len(changes.splitlines()),
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": packages,
        "missing_packages": [name for name, known in packages.items() if known is None],
        "parts": {
            path.stem: {"status": int(path.read_text()), "result": read(path.with_suffix(".json"))}
            for path in sorted(parts.glob("*.status"))
        },
    }


def read(path: Path) -> Any:
    """Returns what a part wrote; None if it wrote nothing."""
    return json.loads(path.read_text()) if path.is_file() else None


def shown(name: str, value: Any) -> str:
    """Returns a cell of a table."""
    if value is None:
        return "-"
    if name.endswith("bytes"):
        return f"{value / 2**30:.2f}"
    if name in ("of_matmuls", "mfu", "hfu", "extra_flops"):
        return f"{value:.0%}"
    if isinstance(value, list):  # median, least, most
        return f"{value[0]:.2f} ({value[1]:.2f} to {value[2]:.2f})"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def page(report: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the page."""
    yield f"# {report['device']['name']}, torch {report['torch']}, {report['date'][:10]}"
    yield f"\nMade by `bash benchmarks/gpu.sh` at commit {report['git_commit']}."
    yield "Not installed: " + (", ".join(report["missing_packages"]) or "nothing") + "."
    for name, part in report["parts"].items():
        yield f"\n## {name}\n"
        if part["status"]:
            yield f"It ended with status {part['status']}.\n"
        result = part["result"] or {}
        if name == "tests":
            yield ", ".join(f"{n} {of}" for of, n in outcomes(result).items())
        rows = result.get("rows", []) if isinstance(result.get("rows", []), list) else []
        if rows:
            heads = [key for key in COLUMNS if key in rows[0]]
            yield "| " + " | ".join(COLUMNS[key] for key in heads) + " |"
            yield "|---" * len(heads) + "|"
            yield from (
                "| " + " | ".join(shown(key, row[key]) for key in heads) + " |" for row in rows
            )


def outcomes(tests: dict[str, Any]) -> Counter[str]:
    """Returns how many tests passed, failed and were skipped."""
    return Counter(test["outcome"] for test in tests.values())


def main() -> int:
    """Writes the report and its page. Returns 0, or 1 if a part failed."""
    parts, output = Path(sys.argv[1]), Path(sys.argv[2])
    report = joined(parts)
    for path, text in (
        (output, json.dumps(report, indent=1)),
        (output.with_suffix(".md"), "\n".join(page(report))),
    ):
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(path)
    print(f"{output} and {output.with_suffix('.md').name} have the results")
    return int(any(part["status"] for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
