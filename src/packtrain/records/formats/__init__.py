"""Formats of data files: which files a source has, how each is cut into units, and how entries are read from it."""
