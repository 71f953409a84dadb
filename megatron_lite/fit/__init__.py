"""Finds the fastest recompute policy with which a step of any model fits a budget of bytes."""
