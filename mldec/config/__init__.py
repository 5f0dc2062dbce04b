"""Settings of a run: the schema, and how YAML, overrides and checkpoints become a `Config`."""
