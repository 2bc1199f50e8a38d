"""Optimizers and sharded tables."""
