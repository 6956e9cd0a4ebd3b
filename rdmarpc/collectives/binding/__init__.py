"""In what forms torch gives a collective, and what its autograd is told of one."""
