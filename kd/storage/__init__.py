"""What lies on disks and in object stores, and how it is read safely."""
