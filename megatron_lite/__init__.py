"""A Megatron-style tensor-parallel GPT training engine. Start reading at pretrain_gpt.py, then
training/loop.py. megatron_lite.api has the functions for your own scripts."""

import sys

__version__ = "0.1.0"

# So it is called while Python looks for the module of `python -m megatron_lite...`, whose imports
# come next. Users of the library keep their Ctrl-C.
if sys.argv[:1] == ["-m"]:
    from megatron_lite.parallel.signals import ctrl_c_ends

    ctrl_c_ends()
