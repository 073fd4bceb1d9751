"""The demo: a small dataset is made, and every stage runs on it."""
