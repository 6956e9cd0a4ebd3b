"""The latencies of ``bench``, row by row."""
