"""Datasets. Each dataset is a function that returns a `Source` or a `DataModule`."""
