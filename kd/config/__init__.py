"""Settings: their types, the classes that they may name, and what is said of a wrong one. Nothing heavy is imported."""
