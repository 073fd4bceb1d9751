"""A dataset and a model's settings -> the cost table, one exact row for each record; parallel and resumable."""
