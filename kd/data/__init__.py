"""Pictures and labels: sources, transforms, the order of samples, batches."""
