"""Slipstream: lossless speculative decoding for language models."""

__version__ = "0.1.0"
