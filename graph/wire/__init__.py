"""The bytes of a slot: the header in front of every payload, the payload's memory order, the metadata of a dynamic edge."""
