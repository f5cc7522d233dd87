"""Metrics of a run and their sinks: console, JSONL, wandb."""
