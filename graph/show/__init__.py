"""A plan for people: its description as data, as tables, as a picture."""
