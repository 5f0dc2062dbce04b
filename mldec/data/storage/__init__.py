"""Where the images of a data set lie: in files of a folder, in tar shards, or in arrays."""
