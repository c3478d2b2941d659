"""Child processes: what they find in their environment, and how they end with the process that started them."""
