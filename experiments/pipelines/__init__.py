"""Pipelines by micro-batches: orders of chains of layers (``schedules``), and a GPT in stages (``gpt``)."""
