"""Measuring what the engine and its parts cost."""
