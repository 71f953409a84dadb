"""Floor 1: the operations, kept tensors and collectives of a model as data, which every prediction
reads. Standard library only.
"""
