"""The storages of tensors, by the addresses under which the product's meters know them."""

from collections import Counter


def address(storage):
    """Returns the address of a storage. It stays the same when the storage's memory is resized."""
    return storage._cdata


def addresses(tensors):
    """Returns the addresses of the tensors' storages."""
    return {address(tensor.untyped_storage()) for tensor in tensors}


def bytes_by_label(meter):
    """Returns the kept bytes by the module that saved them first, "" outside of every module."""
    totals = Counter()
    for storage in meter.storages().values():
        totals[storage.label] += storage.num_bytes
    return totals


def distinct(tensors):
    """Returns the storages of the tensors, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({address(storage): storage for storage in storages}.values())
