"""TLS 1.3 for the streams that leave a host: all of ``tcp``, and the control stream of ``verbs``."""
