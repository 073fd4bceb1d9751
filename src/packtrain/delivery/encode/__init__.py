"""Records encoded for real: pixels, ids, packs."""
