"""Batches in the order of a schedule, from several processes, with a position as their state."""
