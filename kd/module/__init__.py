"""The LightningModule and what its hooks call."""
