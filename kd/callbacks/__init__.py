"""Callbacks: they observe training and write down what they saw. None imports :mod:`kd.module.distillation`."""
