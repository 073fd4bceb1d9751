"""A model's config and costs -> parameters, FLOPs, GPU memory, time, host memory and disk. Numpy only."""
