"""Zero-shot data: seen and unseen classes, and the word vectors that name them."""
