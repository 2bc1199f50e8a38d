"""Fleets of tasks: many models share devices, and take turns on them shard by shard (arXiv 2110.08633)."""
