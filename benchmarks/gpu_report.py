"""Joins what the parts of gpu.sh wrote into one JSON file, and writes a page of it beside it.

    python benchmarks/gpu_report.py PARTS FILE

PARTS is the folder with NAME.json and NAME.status.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from benchmarks.harness import about, table
from megatron_lite.data.durable_files import write_text

PACKAGES = ("transformers", "liger-kernel", "litgpt", "megatron-core")
OUT_OF_TIME = (124, 137)  # of `timeout`


COMMIT = "git describe --always --dirty --abbrev=40 2>/dev/null"  # nothing without a repository


def joined(parts):
    """Returns the report: machine, versions, and of each part its status and what it wrote."""
    versions = {one.name: one.version for one in importlib.metadata.distributions()}
    return {
        **about(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "git_commit": subprocess.getoutput(COMMIT) or None,
        "packages": {name: versions.get(name) for name in PACKAGES},
        "parts": {
            path.stem: {
                "status": int(path.read_text()),
                # a part may have written nothing
                "result": json.loads(file.read_text()) if file.is_file() else {},
            }
            for path in sorted(parts.glob("*.status"))
            for file in [path.with_suffix(".json")]
        },
    }


def page(report):
    """Yields the lines of the page."""
    yield f"# {report['device']}, torch {report['torch']}, {report['date'][:10]}"
    yield f"\nMade by `bash benchmarks/gpu.sh` at commit {report['git_commit']}."
    yield ""
    yield "Packages: " + ", ".join(f"{name} {has}" for name, has in report["packages"].items())
    for name, part in report["parts"].items():
        yield f"\n## {name}\n"
        if part["status"]:
            cut = " (its time ran out)" * (part["status"] in OUT_OF_TIME)
            yield f"It ended with status {part['status']}{cut}.\n"
        result = part["result"]
        if name == "tests":
            outcomes = Counter(test["outcome"] for test in result.values())
            yield ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        elif result.get("rows"):
            yield from table(result["rows"])
        else:
            yield "It wrote no rows."
        if name != "tests":
            for who, why in result.get("skipped", {}).items():
                yield f"\n{who} left out: {why}"


def main():
    """Writes the report and its page. Returns 0, or 1 if a part failed."""
    parts, output = map(Path, sys.argv[1:])
    report = joined(parts)
    beside = output.with_suffix(".md")
    write_text(str(output), json.dumps(report, indent=1) + "\n")
    write_text(str(beside), "\n".join([*page(report), ""]))
    print(f"{output} and {beside.name} have the results")
    return int(any(part["status"] for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
