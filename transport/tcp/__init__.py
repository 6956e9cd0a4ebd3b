"""The ``tcp`` device, between any hosts. Sockets carry the copies: payload is received straight into the destination."""
