"""Models that learn: ``digits_*`` over places; ``ddp_*``, a process group and what hides it; ``scaling_*``, more workers than
cores; ``pipeline_*`` and ``gpt``, stages with micro-batches; ``learning_*``, to a target through parameter servers;
``federation_worker``, clients behind a slow link; ``actor`` and ``learner``, A3C; ``experts``, ``graphs`` and ``spread_*``,
models that lie at workers in other ways than by layers."""
