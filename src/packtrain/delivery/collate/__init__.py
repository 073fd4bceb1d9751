"""Samples of packs -> the arguments of one forward pass, packed into one row or padded."""
