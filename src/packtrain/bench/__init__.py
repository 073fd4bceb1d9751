"""The benchmarks behind `packtrain bench`: ratios between alternatives measured in one run."""
