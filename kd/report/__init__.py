"""Reads a run's records and explains them. Imports neither torch nor lightning."""
