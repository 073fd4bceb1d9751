"""Is packing correct on this model? Packed and alone compared, neighbours changed, traps found."""
