"""Process groups and sharding that Lightning does not have."""
