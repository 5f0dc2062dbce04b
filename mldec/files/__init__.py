"""Files: text, atomic writes, tensors, the cache, and run folders."""
