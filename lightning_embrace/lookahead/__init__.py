"""The next batch before its turn: a loader that holds one batch ahead, and what its tensors will look up."""
