"""Thresholds and calibrated scores from validation images: the work of `mldec.calibrate`."""

MIN_POSITIVES = 10  # classes with fewer share a threshold, unless the user says otherwise
