"""More workers than there are cores: emulated computation, and a simulated continuation to many hosts."""
