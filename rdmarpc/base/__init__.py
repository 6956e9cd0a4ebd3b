"""What every other room may use: this process's worker, futures, and values in the order of GPU streams."""
