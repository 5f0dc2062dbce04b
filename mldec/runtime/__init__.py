"""Processes, devices, numbers formats, signals, memory and the console: where a run happens."""
