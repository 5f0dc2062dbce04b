"""The data sets that come with the package: scenes of handwritten digits, drawn on demand."""
