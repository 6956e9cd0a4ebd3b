"""A plan for people: described, drawn, in tables."""
