"""The storages of images: files in a folder, tar shards, or arrays."""
