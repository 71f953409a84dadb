"""Measures the memory that a run really keeps: saved tensors, live storages, a timeline."""
