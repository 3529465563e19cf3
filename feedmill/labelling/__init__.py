"""Copy a file's rows with a label for each."""
