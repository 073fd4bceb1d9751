"""What a training step will need: parameters, FLOPs, GPU memory, time, host memory and disk. Numpy only."""
