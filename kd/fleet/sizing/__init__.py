"""The size of the student for a latency budget, before training."""
