"""Exchange of gradients by parameter servers, beside what others do (``minibatch``)."""
