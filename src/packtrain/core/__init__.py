"""Frozen values, errors, seeded random streams, fingerprints and atomic artifacts; standard library and numpy only."""
