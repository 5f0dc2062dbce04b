"""Thresholds and calibrated scores from validation images: the work of `mldec.calibrate`."""
