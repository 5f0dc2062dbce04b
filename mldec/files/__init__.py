"""Files: text, atomic writes, tensors, the cache, and the folder of a run."""
