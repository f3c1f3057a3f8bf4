"""Continuous batching around one short loop: `step.py` is where to begin reading."""
