"""How a job on several machines is recognised."""
