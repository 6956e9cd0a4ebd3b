"""The memory that peers may touch, by whatever device they reach it: the arena (an allocator over registered segments), the
table of regions, cross-memory attach, by which the kernel copies between processes, and what forked children see."""
