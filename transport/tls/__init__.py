"""TLS 1.3 for the streams that leave a host."""
