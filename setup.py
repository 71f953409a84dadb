"""The installation of the package and its dependencies.

constraints.txt has the exact versions: `pip install -c constraints.txt -e .[test]`.
"""

from setuptools import find_packages, setup

setup(
    name="megatron-lite",
    version="0.1.0",
    description="A Megatron-style tensor-parallel GPT training engine",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    package_data={
        "megatron_lite.plan": ["machines/*.json"],
        "megatron_lite.pages": ["*.css", "*.js"],
    },
    install_requires=[
        "torch>=2.6",
        "numpy",
        "safetensors",
        "tokenizers",
        "rich",
        "tensorboard",
        "PyYAML",
        "tomli; python_version < '3.11'",
    ],
    extras_require={
        "plot": ["matplotlib"],
        "wandb": ["wandb"],
        "tokenizers": ["sentencepiece", "tiktoken"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "transformers",
            "ruff",
            "mypy",
            "matplotlib",
        ],
        # Tests compare with megatron-core, and skip these comparisons if it is not installed. CI
        # installs it without its dependencies:
        # `pip install -c constraints.txt --no-deps megatron-core einops packaging`.
        "parity": ["megatron-core==0.16.1", "einops", "packaging"],
    },
)
