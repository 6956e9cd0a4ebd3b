"""Letting peers in, and telling a silent peer from a busy one: addresses, handshakes, mutual authentication, signs of life,
and the thread of a device that hears its peers."""
