"""One training step: what a student learns from a teacher. Knows neither Lightning nor files nor the command line."""
