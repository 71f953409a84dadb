"""The idle time of a pipeline by its formula.

It is an oracle for the simulated schedules and for the examples' table.
"""


def bubble(*, size, num_microbatches, num_chunks=1):
    """Returns the idle time over the busy time of a rank: (p - 1) / (v m).

    All stages take equally long. See section 2.2 of 2104.04473.
    """
    return (size - 1) / (num_chunks * num_microbatches)
