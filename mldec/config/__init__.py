"""A run's settings: their schema, and the way from YAML, the command line or a checkpoint to them."""
