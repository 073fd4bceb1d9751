"""A model and packed samples -> is packing correct on it? Packed and alone compared, neighbours changed."""
