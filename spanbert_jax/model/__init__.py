"""Encoder, heads and losses: pure functions and linen modules, no input or output."""
