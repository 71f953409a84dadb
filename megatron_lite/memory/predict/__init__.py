"""Predicts kept bytes, peaks, FLOPs, collectives and parameters, as sums over the description.

No torch.
"""
