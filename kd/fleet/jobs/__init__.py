"""Runs on other machines: a job as it is asked for, and one file for each place that it can be sent to."""
