"""Running many experiments one after the other, keeping what is finished, and joining all into one report."""
