"""Perplexity by length, attention resolution, retrieval and the report."""
