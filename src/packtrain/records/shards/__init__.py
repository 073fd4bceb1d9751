"""Data files as plain bytes, wherever they are: local, compressed, remote, through a cache with a budget."""
