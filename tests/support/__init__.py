"""What the tests share: worker processes, small models and reference runs."""
