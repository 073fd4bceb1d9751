"""A training run as its folder tells it: metrics, early warnings, evaluations; several runs compared."""
