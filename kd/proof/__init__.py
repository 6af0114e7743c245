"""What pictures prove about two models: exact counts, bounds and words. NumPy and SciPy; nothing here reads a file."""
