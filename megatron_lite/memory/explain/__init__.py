"""Predictions as text: costs of settings, the report of --explain-recompute, advice. No torch."""
