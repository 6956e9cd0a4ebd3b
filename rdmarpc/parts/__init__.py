"""The parts of a model that lie at other workers: where each goes, how it travels, and what stands here for it."""
