"""Finding, sharding and looking up embedding tables."""
