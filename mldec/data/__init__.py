"""Datasets: each option is one function, which returns a `Source` or a `DataModule`."""
