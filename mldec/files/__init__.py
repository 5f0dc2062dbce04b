"""How files are opened, read and written: whole or not at all, and never trusted."""
