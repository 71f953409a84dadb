"""A Megatron-style tensor-parallel GPT training engine. Start reading at pretrain_gpt.py, then
training/loop.py. megatron_lite.api has the functions for your own scripts."""

import sys

__version__ = "0.2.0"

# A program begins with these imports: `python -m megatron_lite...`, whose module Python still looks
# for, and the command. Users of the library keep their Ctrl-C.
_is_looked_for = sys.argv[:1] == ["-m"] and any(
    one == "-m" and other.split(".")[0] == "megatron_lite"
    for one, other in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
)
if _is_looked_for or (sys.argv[:1] and sys.argv[0].endswith("/megatron-lite")):
    from megatron_lite.parallel.signals import ctrl_c_ends

    ctrl_c_ends()
