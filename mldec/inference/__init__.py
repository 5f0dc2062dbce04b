"""Images in, answers out: the engines that score, the workers that decode, the files of rows."""
