"""Checkpoints: what is saved, in which layout, and how it is read again."""
