"""``kd-tune``: searches for a better run. A trial is a ``kd-train`` process of its own."""
