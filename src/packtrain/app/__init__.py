"""The verbs as functions, and the datasets: what the command line and users' programs call.

Takes names and paths (a dataset, a model, a config, the folder of a run) and gives the outcome of one stage or of
several in a row: `measure`, `pack`, `plan`, `train.train`, `verify`, `calibrate` and `convert`, one module each, and
`datasets` for your own training loop. Nothing here computes costs, packs or losses: each function reads settings, looks
for what was made before (`reuse`), runs a stage and says what was done. `cache` lists and clears what the stages
stored; `inspect_plan` and `inspect_batch` look into a plan, a pack and a step.
"""
