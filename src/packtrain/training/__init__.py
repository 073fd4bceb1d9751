"""Batches -> optimizer steps: the trainer, its checkpoints, metrics and early warnings."""
