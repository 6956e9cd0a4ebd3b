"""The ground floor, which every other room may use: this process's worker (as a Protocol), futures, and
values in the order of GPU streams."""
