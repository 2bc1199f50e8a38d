"""Hydra: trains what does not fit the device, spilled over device, host and disk (arXiv 2110.08633)."""
