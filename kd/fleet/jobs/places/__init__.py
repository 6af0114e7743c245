"""Runs on other machines: a job, and one file for each place that it can be sent to."""
