"""Who makes the training views. The engine ``torch`` is the loader's processes: :mod:`kd.data.datamodule`."""
