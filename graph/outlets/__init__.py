"""The sender's half of an edge (a tensor that crosses from one worker to another): prepared writes into the consumer's slots,
credits, writing in place; and what it shares with the consumer's half (``edges``)."""
