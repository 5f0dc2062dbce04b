"""The environment of a run: processes, devices, signals, memory and the console."""
