"""A machine with GPUs, as far as torch tells of them."""

import torch


def show_gpus(patch, count, *, name="Card"):
    """torch tells of this many GPUs with this name. Returns a list of those that get chosen."""
    chosen = []
    for function, answer in {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "set_device": chosen.append,
        "get_device_name": lambda device: name,
    }.items():
        patch.setattr(torch.cuda, function, answer)
    return chosen
