"""Scenes of handwritten digits, made while they are needed: the data sets that come with the package."""
