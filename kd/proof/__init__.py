"""What pictures prove about two models: exact counts, bounds and words. NumPy alone; nothing here reads a file."""
