"""Tiny models for tests."""

from slipstream.check.tiny import LetterTokenizer, loaded, tiny_config, tiny_model

__all__ = ["LetterTokenizer", "loaded", "tiny_config", "tiny_model"]
