"""Positions, attention, key-value cache and decoder: pure PyTorch, no ranks, no files."""
