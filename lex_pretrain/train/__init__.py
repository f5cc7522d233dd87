"""Trainer, schedule, checkpoints and the DeepSpeed configuration."""
