"""The bytes in front of and inside a slot."""
