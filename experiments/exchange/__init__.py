"""Exchange of gradients by parameter servers, beside what others do (``minibatch``), and collectives beside gloo's
(``collective_*``)."""
