"""Distributed pretraining of the LeX (length-extrapolatable) Transformer."""

__version__ = "0.1.0"
