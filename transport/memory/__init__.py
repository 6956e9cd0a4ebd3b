"""The memory that peers may touch, by whatever device they reach it: the arena, the table of regions, and memory of other
processes that is attached here."""
