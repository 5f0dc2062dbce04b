"""Zero-shot data: seen and unseen classes, and their word vectors."""
