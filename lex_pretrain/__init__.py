"""Distributed pretraining of the LeX (length-extrapolatable) Transformer."""

__version__ = "0.2.0"
