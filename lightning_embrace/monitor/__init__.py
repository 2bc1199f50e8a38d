"""Records when exchanges and compute run, shows it as a Chrome trace, and sums it up by step."""
