"""Report on a checkpoint: one HTML page."""
