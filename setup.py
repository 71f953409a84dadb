"""The installation of the package and its dependencies.

constraints.txt has the exact versions: `pip install -c constraints.txt -e .[test]`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = (ROOT / "megatron_lite" / "__init__.py").read_text()
VERSION = re.findall(r'__version__ = "(.+)"', PACKAGE)[0]

setup(
    name="megatron-lite",
    version=VERSION,
    description="A Megatron-style tensor-parallel GPT training engine",
    license="Apache-2.0",
    license_files=["LICENSE"],
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # arguments.py and pretrain_gpt.py are for a checkout: an installation has this command instead,
    # and no top-level module with a name as general as `arguments`.
    entry_points={"console_scripts": ["megatron-lite = megatron_lite.__main__:main"]},
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    package_data={
        "megatron_lite": ["py.typed"],
        "megatron_lite.config": ["*.json"],
        "megatron_lite.convert.megatron": ["*.json"],
        "megatron_lite.plan": ["machines/*.json"],
        "megatron_lite.pages": ["*.html"],
    },
    install_requires=[
        # The releases that the tests have run with are 2.8, 2.13 and 2.15: tests/torch_versions.sh
        # runs them with the oldest and the newest one, docs/installation.md has the results.
        "torch>=2.8,<2.16",
        "numpy",
        "safetensors",
        "tokenizers",
        "rich",
        "PyYAML",
        "tomli; python_version < '3.11'",
    ],
    extras_require={
        "plot": ["matplotlib", "jinja2"],  # pages of runs and plans, and pictures
        "tensorboard": ["tensorboard"],  # writes and shows the files of --tensorboard-dir
        "hf": ["transformers"],
        "wandb": ["wandb"],
        "tokenizers": ["sentencepiece", "tiktoken"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "expecttest",  # the databases of operators and modules in torch.testing need it
            "transformers",
            "tensorboard",
            "ruff",
            "mypy",
            "matplotlib",
            "jinja2",
        ],
        # Tests compare with megatron-core, and skip these comparisons if it is not installed. CI
        # installs it without its dependencies:
        # `pip install -c constraints.txt --no-deps megatron-core einops packaging`.
        "parity": ["megatron-core==0.16.1", "einops", "packaging"],
    },
)
