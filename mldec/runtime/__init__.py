"""Runtime environment: ranks, devices, signals, memory and console output."""
