"""Remote references: values that stay at their owner, handles to them that travel, and the protocol that keeps values alive."""
