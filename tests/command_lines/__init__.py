"""Command lines of public launch scripts, and the test of how many of them start.

    scripts.json             command lines of scripts and READMEs in public repositories
    scripts_held_back.json   a third of them, chosen by a hash of the name. Nobody looks at these
                             when the program is made to accept more; they check that it accepts
                             other scripts too
    nvidia_gpt_tests.json    the arguments of NVIDIA's own functional tests of GPT
    nvidia_moe_tests.json    those of its tests of mixtures of experts that train, without FP8 and
                             multi-token prediction
    megatron_flags.json      the flags of all releases of Megatron-LM: the number of their values,
                             the first and the last release

A file has facts only: the source, as repository[@tag]:path, and the list of arguments. Values that
a script takes from the environment are filled in with plausible ones. Paths keep their last part,
and begin with /data. Blends are cut to four datasets.

The command lines are plain: they train a dense GPT with Megatron-LM. Left out are lines with
mixture-of-experts layers, multi-latent attention, multi-token prediction, hybrid layers, FP8,
retrieval, reinforcement learning, inference or distillation; lines for DeepSpeed's engine; lines
with a flag that no release of NVIDIA has; and lines without data, tokenizer or a size. Lines with
the same flags and sizes count once, and a repository has at most 15, except NVIDIA's.
"""
