"""Datasets: each option is one function that returns a `DataModule` (see `types`)."""
