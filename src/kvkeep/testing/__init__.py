"""Tests for you to subclass: they prove that a layer codec of your own does what kvkeep relies on.

Nothing in kvkeep imports this package, and it needs no test runner: what fails raises ``AssertionError``.
"""

from kvkeep.testing.layer_codec import LayerCodecContract, token_rows

__all__ = ["LayerCodecContract", "token_rows"]
