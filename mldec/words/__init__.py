"""Word vectors of class names, from text encoders and files."""
