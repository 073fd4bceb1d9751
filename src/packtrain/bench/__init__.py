"""The benchmarks behind `packtrain bench`: ratios of things measured side by side in one run."""
