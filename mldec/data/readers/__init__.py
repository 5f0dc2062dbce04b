"""The readers: each makes a `Source` of the annotation files of one data set."""
