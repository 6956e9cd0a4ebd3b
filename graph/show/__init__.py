"""A plan for people: its description as data, as tables, as a picture, and in what it is not as one process."""
