"""The training loop: epochs, steps, what they report, and the folder they write to."""
