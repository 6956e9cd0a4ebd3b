"""What a message carries: objects as bytes, tensors as places."""
