"""The benchmarks of `packtrain bench`: each compares alternatives within one run."""
