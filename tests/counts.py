"""Counts by which a checkout can be compared with an earlier one, and their budgets.

python -m tests.counts                      this checkout
python -m tests.counts --root OTHER         another one
"""

import argparse
import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IGNORED = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)
# No count may be above its budget. A budget is changed by hand, with the reason in the commit.
BUDGETS = {
    "tokens of the library": 293_695,
    "files of the library": 260,
    "tokens of tests": 270_521,
    "tokens of benchmarks": 20_000,
    "own files in one plain step": 32,
    "own functions in one plain step": 125,
    "tokens that a training process has loaded": 117_500,
    "own calls in one forward of a column-parallel linear layer": 4,
    "functions named *notices*": 1,
    "places that read JSON": 1,
    "places that write durably": 1,
    'conditions on "cpu" in model/ and tensor_parallel/': 3,
    "pages of docs": 22,
    "words of docs": 30_000,
}

# One step is what runs between two calls of autograd's engine. A list comprehension is no function,
# as from Python 3.12 on.
PLAIN_STEP = """
import json
import os
import sys

import torch

sys.argv = ["pretrain_gpt.py"] + (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 1 --train-iters 5 "
    "--lr 1e-3 --mock-data --vocab-size 30 --eval-iters 0 --log-interval 1 "
    "--distributed-backend gloo"
).split()
root, called, backwards = os.getcwd() + os.sep, set(), 0


def watch(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root + "megatron_lite") and (
        code.co_name not in ("<listcomp>", "<setcomp>", "<dictcomp>")
    ):
        called.add((code.co_filename, code.co_qualname if hasattr(code, "co_qualname") else code))


def counted(*arguments, engine=torch.autograd._engine_run_backward, **options):
    global backwards
    backwards += 1
    sys.setprofile(watch if backwards == 3 else None)
    return engine(*arguments, **options)


from megatron_lite.cli.pretrain import main

torch.autograd._engine_run_backward = counted
try:
    main()
except SystemExit:
    pass
loaded = {
    str(module.__file__)
    for name, module in list(sys.modules.items())
    if name.startswith("megatron_lite") and getattr(module, "__file__", None)
}

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.weight_gradient import accumulate_with_
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear
from megatron_lite.tensor_parallel.rank_context import RankContext

cpu = torch.device("cpu")
context = RankContext(rng=RngStreams(cpu, seed=0), device=cpu, params_dtype=torch.float32)
layer = ColumnParallelLinear(8, 8, bias=True, init_std=1.0, context=context)
accumulate_with_(None, layer.weight, torch.zeros(8, 8))
states, calls = torch.zeros(4, 2, 8, requires_grad=True), []
sys.setprofile(
    lambda frame, event, _: calls.append(1)
    if event == "call" and "megatron_lite" in frame.f_globals.get("__name__", "")
    else None
)
layer(states)
sys.setprofile(None)
files = {file for file, _ in called}
print("COUNTS" + json.dumps([len(files), len(called), sorted(loaded), len(calls)]))
"""


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    for name, value in counts(parser.parse_args().root.resolve()):
        budget = BUDGETS.get(name)
        print(f"{value:>9,}  {name}" + (f" (at most {budget:,})" if budget is not None else ""))
    return 0


def counts(root):
    """Yields the counts of a checkout, with their names."""
    library = [*_sources(root / "megatron_lite"), root / "arguments.py", root / "pretrain_gpt.py"]
    yield "tokens of the library", tokens_of(library)
    yield "files of the library", len(library)
    yield "tokens of tests", tokens_of(_sources(root / "tests"))
    yield "tokens of benchmarks", tokens_of(_sources(root / "benchmarks"))
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", PLAIN_STEP]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    files, functions, loaded, calls = json.loads(done.stdout.split("COUNTS")[1])
    yield "own files in one plain step", files
    yield "own functions in one plain step", functions
    yield "tokens that a training process has loaded", tokens_of([Path(one) for one in loaded])
    yield "own calls in one forward of a column-parallel linear layer", calls
    nodes = [node for path in library for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    yield "functions named *notices*", sum("notices" in name for name in names)
    called = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    yield "places that read JSON", sum(name in ("json.load", "json.loads") for name in called)
    yield "places that write durably", called.count("os.fsync")
    folders = (root / "megatron_lite" / name for name in ("model", "tensor_parallel"))
    yield (
        'conditions on "cpu" in model/ and tensor_parallel/',
        sum(path.read_text().count('"cpu"') for one in folders for path in one.glob("*.py")),
    )
    pages = sorted((root / "docs").glob("*.md"))
    yield "pages of docs", len(pages)
    # The lines of a table are no words.
    yield "words of docs", sum(len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages)
    own = root / "megatron_lite"
    for path in sorted(path for one in ("json", "html") for path in own.rglob(f"*.{one}")):
        yield f"bytes of {path.relative_to(own)}", path.stat().st_size


def tokens_of(paths):
    """Returns the number of tokens without comments and line breaks."""
    return sum(map(_tokens, paths))


@cache
def _tokens(path):
    count = inside = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        count += not inside and token.type not in IGNORED
        # Since Python 3.12 the parts of an f-string are tokens.
        name = tokenize.tok_name[token.type]
        inside += name.endswith("STRING_START") - name.endswith("STRING_END")
    return count


def _sources(folder):
    return sorted(folder.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
