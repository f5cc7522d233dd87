"""Shard format, manifest, mixture order and loader."""
