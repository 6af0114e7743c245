"""``kd-scale``: how a recipe scales over processes, measured here, and over machines, predicted."""
