"""The Python API for texts and DataFrames. Import its names from `feedmill`."""
