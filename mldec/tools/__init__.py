"""Commands around training and evaluation: `mldec calibrate`, `mldec predict` and others."""
