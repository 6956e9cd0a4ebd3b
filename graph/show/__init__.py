"""What crosses in a step, for people: as data, as tables, as a picture."""
