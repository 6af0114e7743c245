"""Batches made by other machines (``data.engine=ray``)."""
