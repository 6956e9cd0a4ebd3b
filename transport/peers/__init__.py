"""Connections before they carry data, and their end: addresses, handshakes, mutual authentication, heartbeats that tell a
silent peer from a busy one, and the device's thread that listens to its peers. What such threads, and all above, do about
unexpected errors, and where the system lacks or forbids something (``guard``)."""
