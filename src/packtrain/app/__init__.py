"""The verbs as functions: each reads settings, reuses what was made before, runs one stage and returns its outcome."""
