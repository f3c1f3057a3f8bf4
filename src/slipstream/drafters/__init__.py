"""Drafters guess continuations. They may be wrong; they can never change the output."""
