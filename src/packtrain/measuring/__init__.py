"""Records measured: a cost for every record, computed in parallel, resumable, exact."""
