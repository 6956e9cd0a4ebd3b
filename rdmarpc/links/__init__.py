"""Who is there (``group``), frames between any two (rings in the peer's memory, landing places, the order of requests), and who
reads them (``polling``)."""
