"""A cost table, a model and GPUs -> the study: lengths compared, padding beside packing, a recommendation."""
