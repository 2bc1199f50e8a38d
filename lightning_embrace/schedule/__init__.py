"""Which gradient travels when."""
