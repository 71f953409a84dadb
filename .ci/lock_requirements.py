"""Writes requirements.lock: every version of constraints.txt with the SHA-256 of its files, for
`pip install --require-hashes`.

    python .ci/lock_requirements.py
        every Python and platform below; run it when constraints.txt changes
    python .ci/lock_requirements.py --python 3.12
        only this one; hashes of the same versions that are there already stay
    python .ci/lock_requirements.py --wheel FILE.whl
        adds the hash of a file of one's own, such as a CPU build of torch

pip itself looks the files up, in whatever index it is set up for (`pip install --dry-run
--report`), and installs nothing. What a version's files hash to is then written down: an index that
serves another file under that name is refused from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "requirements.lock"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MANYLINUX = ("2_34", "2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5")
PLATFORMS = {
    "x86_64": [
        *(f"manylinux_{one}_x86_64" for one in MANYLINUX),
        "manylinux2014_x86_64",
        "manylinux2010_x86_64",
        "manylinux1_x86_64",
    ],
    "aarch64": [*(f"manylinux_{one}_aarch64" for one in MANYLINUX), "manylinux2014_aarch64"],
    "macos": [
        f"macosx_{one}_{kind}"
        for one in ("14_0", "13_0", "12_0", "11_0", "10_9")
        for kind in ("arm64", "universal2")
    ],
}
PIN = re.compile(
    r"(?P<name>[\w.-]+)==(?P<version>[\w.+]+)(?:; (?P<marker>python_version (?P<op>>=|<) "
    r"\"3\.(?P<minor>\d+)\"))?"
)
HEADER = """\
# Written by .ci/lock_requirements.py from constraints.txt: the same versions, with the SHA-256 of
# their files for Python 3.10 to 3.14 on Linux (x86_64, aarch64) and macOS (arm64). torch's hashes
# are those of the package index, and that of a CPU build.
#   pip install --require-hashes --no-deps -r requirements.lock
#   pip install --no-deps --no-build-isolation -e .
"""


def pins() -> list[re.Match[str]]:
    """The lines of constraints.txt. ValueError for one that is no exact version."""
    found = []
    for line in CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            match = PIN.fullmatch(line)
            if match is None:
                raise ValueError(f"{CONSTRAINTS.name}: {line!r} is no exact version")
            found.append(match)
    return found


def applies(pin: re.Match[str], python: str) -> bool:
    """Whether the line is meant for this Python."""
    if not pin["marker"]:
        return True
    minor, border = int(python.split(".")[1]), int(pin["minor"])
    return minor >= border if pin["op"] == ">=" else minor < border


def key(name: str, version: str) -> tuple[str, str]:
    """A package and its version, without a local part such as +cpu."""
    return re.sub(r"[-_.]+", "-", name).lower(), version.partition("+")[0]


def locked() -> dict[tuple[str, str], set[str]]:
    """The hashes that requirements.lock has by now."""
    found: dict[tuple[str, str], set[str]] = {}
    if LOCK.exists():
        for entry in LOCK.read_text().replace("\\\n", " ").splitlines():
            if match := PIN.match(entry):
                found.setdefault(key(match["name"], match["version"]), set()).update(
                    re.findall(r"sha256:([0-9a-f]{64})", entry)
                )
    return found


def looked_up(python: str, platform: str) -> dict[tuple[str, str], set[str]]:
    """The hashes of the files that pip would install there. A package without a file for it has
    none."""
    found: dict[tuple[str, str], set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        wanted = [f"{pin['name']}=={pin['version']}" for pin in pins() if applies(pin, python)]
        while wanted:
            report, requirements = Path(folder, "report.json"), Path(folder, "requirements.txt")
            requirements.write_text("\n".join(wanted) + "\n")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--quiet",
                "--no-deps",
                "--ignore-installed",
                "--only-binary",
                ":all:",
                "--implementation",
                "cp",
                "--python-version",
                python,
                "--target",
                folder,
                "--report",
                str(report),
                "--requirement",
                str(requirements),
            ]
            for tag in PLATFORMS[platform]:
                command += ["--platform", tag]
            done = subprocess.run(
                command,
                env={**os.environ, "PIP_FIND_LINKS": ""},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                break
            missing = re.search(r"No matching distribution found for (\S+)", done.stderr)
            if missing is None or missing[1] not in wanted:
                raise RuntimeError(done.stderr)
            print(f"{python} {platform}: no file of {missing[1]}", flush=True)
            wanted.remove(missing[1])
        for item in json.loads(report.read_text())["install"]:
            name = key(item["metadata"]["name"], item["metadata"]["version"])
            found.setdefault(name, set()).add(
                item["download_info"]["archive_info"]["hashes"]["sha256"]
            )
    return found


def text(hashes: dict[tuple[str, str], set[str]]) -> str:
    """The whole of requirements.lock. ValueError for a version without a hash."""
    entries = []
    for pin in pins():
        of_pin = sorted(hashes.get(key(pin["name"], pin["version"]), ()))
        if not of_pin:
            raise ValueError(f"{pin[0]}: no file of it was found on any platform")
        entries.append(
            " \\\n".join(
                [pin[0].replace("; ", " ; "), *(f"    --hash=sha256:{one}" for one in of_pin)]
            )
        )
    return HEADER + "\n".join(entries) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes requirements.lock from constraints.txt.")
    parser.add_argument("--python", nargs="*", default=PYTHONS, choices=PYTHONS)
    parser.add_argument("--platform", nargs="*", default=tuple(PLATFORMS), choices=tuple(PLATFORMS))
    parser.add_argument("--wheel", nargs="*", default=(), type=Path)
    args = parser.parse_args()
    hashes = locked()
    for path in args.wheel:
        name, version = path.name.split("-")[:2]
        hashes.setdefault(key(name, version), set()).add(
            hashlib.sha256(path.read_bytes()).hexdigest()
        )
    for python in args.python:
        for platform in args.platform:
            for name, found in looked_up(python, platform).items():
                hashes.setdefault(name, set()).update(found)
            print(f"{python} {platform}: done", flush=True)
    LOCK.write_text(text(hashes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
