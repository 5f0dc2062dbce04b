"""The training loop: epochs, steps, and their reports."""
