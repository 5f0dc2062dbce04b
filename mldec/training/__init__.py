"""The training loop: epochs and steps, their reports, and the folder that they write to."""
